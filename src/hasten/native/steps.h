// What passes and steps have in common beside products and attention: threads and their shares,
// norms, gates, the queries of all heads, caches that grow.
#pragma once

#include <omp.h>

#include <algorithm>
#include <vector>

#include "attention.h"
#include "barrier.h"
#include "linear.h"

namespace hasten {

template <class T> inline void room(std::vector<T> &v, int64_t n) {
  if (int64_t(v.size()) < n) v.resize(size_t(n));
}

// first..last-1 of something.
struct Share {
  int64_t first, last;
};

// One of the threads that run a step together.
class Thread {
 public:
  explicit Thread(Barrier &barrier)
      : me(omp_get_thread_num()), threads(omp_get_num_threads()), barrier_(barrier) {}

  Share share(int64_t n) const { return {n * me / threads, n * (me + 1) / threads}; }

  void wait() const { barrier_.wait(threads); }

  // This thread's part of a product; all have done theirs when it returns.
  void product(const Linear &l, const Inputs &in, int64_t rows, float *out, bool add) const {
    const Share panels = share(panels_of(l.out));
    multiply(l, in, rows, panels.first, panels.last, out, l.out, add);
    wait();
  }

  const int64_t me, threads;

 private:
  Barrier &barrier_;
};

// The same inputs, from row `first` on.
inline Inputs inputs_from(Inputs in, int64_t first) {
  in.values += first * in.stride;
  in.scales += first * in.groups;
  in.sums += first * in.groups;
  return in;
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
inline void normalize(const float *x, const float *weight, int64_t n, float eps, float *out) {
  f32x16 squares = {};
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) squares = fma(load(x + i), load(x + i), squares);
  float total = sum(squares);
  for (; i < n; ++i) total += x[i] * x[i];
  const float scale = 1.0f / std::sqrt(total / float(n) + eps);
  for (int64_t j = 0; j < n; ++j) out[j] = weight ? x[j] * scale * weight[j] : x[j] * scale;
}

// Rows of x (rows, n), normalised, as inputs of a product. They are kept as floats too, `lead`
// numbers apart; where that is 0 only each thread's last one is, so `kept` must be its own.
inline void normal(const Thread &t, const float *x, const float *weight, int64_t n, float eps,
                   int64_t rows, const Inputs &in, float *kept, int64_t lead) {
  const Share share = t.share(rows);
  for (int64_t i = share.first; i < share.last; ++i) {
    normalize(x + i * n, weight, n, eps, kept + i * lead);
    prepare(in, i, kept + i * lead, 0, n, n);
  }
  t.wait();
}

inline f32x16 silu(f32x16 x) {
  const f32x16 size = x < 0.0f ? x : -x, e = exp(size), one = all(1.0f);
  return x < 0.0f ? x * e / (one + e) : x / (one + e);
}

// silu(gate) * up of rows (rows, 2 * inner) that hold both side by side, as inputs of a product.
inline void gated(const Thread &t, const float *gate_up, int64_t inner, int64_t rows,
                  const Inputs &in) {
  const int64_t groups = padded(inner) / GROUP;
  const Share share = t.share(rows * groups);
  for (int64_t i = share.first; i < share.last; ++i) {
    const int64_t row = i / groups, at = i % groups * GROUP;
    const size_t n = size_t(std::min<int64_t>(GROUP, inner - at));
    const float *gate = gate_up + row * 2 * inner + at;
    float value[GROUP], a[GROUP] = {}, b[GROUP] = {};
    std::memcpy(a, gate, n * 4);
    std::memcpy(b, gate + inner, n * 4);
    for (int j = 0; j < GROUP; j += LANES) store(value + j, silu(load(a + j)) * load(b + j));
    prepare(in, row, value, at, at + int64_t(n), inner);
  }
  t.wait();
}

// Memory for n numbers, none of which is there yet.
template <class T> inline void spare(std::vector<T> &v, int64_t n) {
  if (v.capacity() < size_t(n)) v.reserve(std::max(size_t(n), 2 * v.capacity()));
}

// Room for attention to `slots` slots, `pending` of them pending, so that threads need no more.
inline void scratch_room(std::vector<Scratch> &scratch, int64_t threads, int64_t slots,
                         int64_t pending, int64_t dim) {
  constexpr int64_t most = 6;  // queries at once
  room(scratch, threads);
  for (Scratch &each : scratch) {
    spare(each.scores, most * (slots + 2 * LANES));
    spare(each.pending, most * (pending + 2 * LANES));
    spare(each.queries, most * dim);
    spare(each.seen, most * pending);
  }
}

template <Stored S>
inline void attend_some(int64_t n, const Sequence &s, const Place &p, int64_t kv_head,
                        const float *const *q, const int64_t *rows, float *const *out,
                        Scratch &scratch) {
  int64_t i = 0;
  for (; i + 6 <= n; i += 6) attend<S, 6>(s, p, kv_head, q + i, rows + i, out + i, scratch);
  for (; i + 3 <= n; i += 3) attend<S, 3>(s, p, kv_head, q + i, rows + i, out + i, scratch);
  for (; i < n; ++i) attend<S, 1>(s, p, kv_head, q + i, rows + i, out + i, scratch);
}

// What the heads of all rows of a sequence gather. Queries are rows of `lead` numbers; what they
// gather goes to `out` (rows, heads * dim) and, where heads are whole groups, to `in`.
struct Gathering {
  const float *queries;
  int64_t lead;
  float *out;
  Inputs in;

  // The same, where row 0 is what is row `first` here.
  Gathering from(int64_t first, const Place &p) const {
    return {queries + first * lead, lead, out + first * p.heads * p.dim, inputs_from(in, first)};
  }

  // Queries from..to-1, at most 6, of those that share a key head.
  void tile(const Sequence &s, const Place &p, Stored stored, int64_t kv_head, int64_t from,
            int64_t to, Scratch &scratch) const {
    const int64_t group = p.heads / p.kv_heads, n = to - from;
    const float *q[6];
    float *mix[6];
    int64_t rows[6], heads[6];
    for (int64_t i = 0; i < n; ++i) {
      rows[i] = (from + i) / group;
      heads[i] = kv_head * group + (from + i) % group;
      q[i] = queries + rows[i] * lead + heads[i] * p.dim;
      mix[i] = out + (rows[i] * p.heads + heads[i]) * p.dim;
    }
    with(stored, [&](auto kind) {
      attend_some<decltype(kind)::value>(n, s, p, kv_head, q, rows, mix, scratch);
    });
    if (p.dim % GROUP) return;
    for (int64_t i = 0; i < n; ++i)
      prepare(in, rows[i], mix[i], heads[i] * p.dim, (heads[i] + 1) * p.dim, p.heads * p.dim);
  }

  // This thread's part. Queries that share a key head go together, six at a time; fewer where there
  // are few, so that every thread has some. `item` counts tiles over all sequences of a pass.
  void gather(const Thread &t, const Sequence &s, const Place &p, Stored stored,
              Scratch &scratch, int64_t &item) const {
    const int64_t queries = s.rows * p.heads / p.kv_heads;
    const int64_t each = queries * p.kv_heads / (3 * t.threads);
    const int64_t size = each >= 6 ? 6 : each >= 3 ? 3 : 1;
    for (int64_t h = 0; h < p.kv_heads; ++h)
      for (int64_t from = 0; from < queries; from += size, ++item)
        if (item % t.threads == t.me)
          tile(s, p, stored, h, from, std::min(queries, from + size), scratch);
  }

  // Waits until all have gathered; makes `rows` rows ready where heads alone couldn't be.
  void finish(const Thread &t, const Place &p, int64_t rows) const {
    t.wait();
    if (p.dim % GROUP == 0) return;
    const Share share = t.share(rows);
    const int64_t n = p.heads * p.dim;
    for (int64_t i = share.first; i < share.last; ++i) prepare(in, i, out + i * n, 0, n, n);
    t.wait();
  }
};

// A request's keys and values in blocks by layer and head, see attention.h.
struct GrowingCache {
  std::vector<uint8_t> bytes;
  int64_t capacity = 0;  // slots

  // Room for `slots` slots of `heads` key and value heads in all; what is held stays.
  void grow(int64_t slots, int64_t heads, int64_t dim, Stored stored) {
    if (slots <= capacity) return;
    const int64_t least = std::max<int64_t>(slots + 128, 2 * capacity);
    const int64_t wanted = (least + LANES - 1) / LANES * LANES, size = slot_bytes(stored, dim);
    std::vector<uint8_t> grown(size_t(heads * wanted * size));
    for (int64_t h = 0; h < heads && capacity; ++h)
      std::memcpy(grown.data() + h * wanted * size, bytes.data() + h * capacity * size,
                  size_t(capacity * size));
    bytes.swap(grown);
    capacity = wanted;
  }

  // Writes a slot of one head.
  void put(const Place &p, Stored stored, int64_t head, int64_t slot, const float *key,
           const float *value) {
    const int64_t size = capacity * slot_bytes(stored, p.dim);
    uint8_t *keys = bytes.data() + (p.layer * 2 * p.kv_heads + head) * size;
    write_slot(stored, keys, keys + p.kv_heads * size, p.dim, slot, key, value);
  }
};

}  // namespace hasten
