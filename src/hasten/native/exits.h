// Exit modules of kind `deep` at exit 0, as Python sees them, and what a request's run of one holds.
// Such a module drafts before the trunk runs: a row is its token's embedding, and a feature, which
// the target's states at some deep layers make at verified rows (that of the row before), and the
// module's own output at the parent at drafted ones. See hasten/exits/modules.py.
#pragma once

#include <algorithm>
#include <vector>

#include "attention.h"
#include "barrier.h"
#include "linear.h"

namespace hasten {

struct ExitModel {
  int64_t hidden, inner, heads, kv_heads, dim, deep;  // inner: 0 for no MLP; deep: layers
  int64_t half;       // embeddings, states, extra rows, keys and values: bfloat16, else floats
  float eps, unused;
  const void *table;  // embeddings (vocabulary, hidden)
  const float *frequencies;  // dim / 2
  const float *norm;         // (hidden), before the head; other norms are folded into the products
  // mixed: q, k, v and what a row adds to its feature, of embedding and feature side by side
  Linear fuse, mixed, out, gate_up, down;
};

// Logits of a draft vocabulary: those of a product, then those of some rows as they are.
struct ExitHead {
  Linear product;
  const void *extra;  // (extras, hidden)
  int64_t extras;
  const int64_t *ids;  // what all logits stand for
};

// Takes the waiting rows, and some drafted ones.
struct ExitStep {
  int64_t drafted, want, width, threads;  // want: outputs of the last so many rows
  const int64_t *tokens;    // of the drafted rows
  const int32_t *parents;   // of them: drafted rows since the last root; -1 for the root
  const float *above;       // (drafted, hidden), their features; null: the outputs at their parents
  float *hidden;            // (want, hidden), before the last norm; or null
  const ExitHead *head;     // or null
  float *chances;           // (want, width), largest first
  int64_t *ids;             // (want, width); -1 where logits aren't finite: the row says nothing
};

// One thread's best of a row's logits, and the sum of the exponentials over `top`.
struct Best {
  float top, total;
  int64_t count;
  bool broken;
};

struct ExitRun {
  // What is kept from step to step.
  int64_t length = 0, drafted = 0, capacity = 0;  // rows in the cache: verified, then drafted
  std::vector<uint8_t> cache;      // see attention.h
  std::vector<int64_t> waiting;    // tokens of verified rows that aren't in the cache
  std::vector<uint8_t> states;     // (held, deep, hidden): the row before them, then theirs
  int64_t held = 0;
  std::vector<int32_t> parents, depths;  // of the drafted rows
  std::vector<float> outputs;            // at the drafted rows

  // What a step works with.
  Barrier barrier;
  Buffer deep, both, narrow, wide;
  std::vector<float> rows, features, mixed, gathered, gate_up, normed, logits, mask, values;
  std::vector<int64_t> places;
  std::vector<Best> best;
  std::vector<Scratch> scratch;
};

template <class T> inline void room(std::vector<T> &v, int64_t n) {
  if (int64_t(v.size()) < n) v.resize(size_t(n));
}

// Room for `rows` rows in the cache, which keeps its numbers.
inline void grow_cache(const ExitModel &m, ExitRun &r, int64_t rows) {
  if (rows <= r.capacity) return;
  const int64_t least = std::max<int64_t>(rows + 128, 2 * r.capacity);
  const int64_t capacity = (least + LANES - 1) / LANES * LANES, size = m.dim * (m.half ? 2 : 4);
  std::vector<uint8_t> grown(size_t(2 * m.kv_heads * capacity * size));
  for (int64_t h = 0; h < 2 * m.kv_heads && r.capacity; ++h)
    std::memcpy(grown.data() + h * capacity * size, r.cache.data() + h * r.capacity * size,
                size_t(r.capacity * size));
  r.cache.swap(grown);
  r.capacity = capacity;
}

// n numbers as floats, from bfloat16 or floats.
inline void widen(const void *from, int64_t half, int64_t at, int64_t n, float *out) {
  if (!half) {
    std::memcpy(out, static_cast<const float *>(from) + at, size_t(n) * 4);
    return;
  }
  const uint16_t *numbers = static_cast<const uint16_t *>(from) + at;
  for (int64_t i = 0; i < n; ++i) out[i] = from_bf16(numbers[i]);
}

// x over its root mean square, times weight where there is one; in place is fine.
inline void scale_rows(const float *x, const float *weight, int64_t n, float eps, float *out) {
  f32x16 squares = {};
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) squares = fma(load(x + i), load(x + i), squares);
  float total = sum(squares);
  for (; i < n; ++i) total += x[i] * x[i];
  const float scale = 1.0f / std::sqrt(total / float(n) + eps);
  for (int64_t j = 0; j < n; ++j) out[j] = weight ? x[j] * scale * weight[j] : x[j] * scale;
}

inline float dot(const float *x, const void *row, int64_t half, int64_t n) {
  f32x16 products = {};
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) {
    const uint8_t *at = static_cast<const uint8_t *>(row) + i * (half ? 2 : 4);
    const f32x16 y = half ? Cache<true>::values(at) : Cache<false>::values(at);
    products = fma(load(x + i), y, products);
  }
  float total = sum(products);
  for (; i < n; ++i)
    total += x[i] * (half ? from_bf16(static_cast<const uint16_t *>(row)[i])
                          : static_cast<const float *>(row)[i]);
  return total;
}

inline f32x16 silu(f32x16 x) {
  const f32x16 size = x < 0.0f ? x : -x, e = exp(size), one = all(1.0f);
  return x < 0.0f ? x * e / (one + e) : x / (one + e);
}

}  // namespace hasten
