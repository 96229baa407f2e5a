// Attention of some query vectors over one key head's cache.
//
// Keys lie in tiles of 16 slots, a slot a lane ([slot / 16][dim][16], bfloat16 in pairs of features),
// values by slot ([slot][dim]). A query sees every committed slot and, of the pending ones, those on
// its own path, in order. Scores are sums over the features in order, weights are summed by position
// modulo 16, the mix goes over positions in order: a query's bits depend on what it sees and on
// nothing else, be it in a tree, a chain, a batch, or alone.
#pragma once

#include <limits>
#include <vector>

#include "simd.h"

namespace hasten {

struct Part {
  uint8_t *base;     // the block's first layer
  int64_t capacity;  // slots it has room for
  int64_t slots;     // slots to see; of the last part: committed and pending
};

// One sequence in a pass. The last part is the tail; its slots from `committed` on are pending.
struct Sequence {
  const Part *parts;
  int64_t count, committed, pending, rows;
  const int32_t *slots;  // where each row writes in the tail
  const float *mask;     // (rows, pending), 0 where a row sees; null: row i sees pending - rows + i + 1
};

template <bool HALF> struct Cache;

template <> struct Cache<false> {
  static constexpr int64_t BYTES = 4;
  static float value(const uint8_t *p, int64_t i) { return reinterpret_cast<const float *>(p)[i]; }
  static f32x16 values(const uint8_t *p) { return load(reinterpret_cast<const float *>(p)); }

  static void put(uint8_t *key, uint8_t *val, int64_t dim, int64_t slot, const float *k,
                  const float *v) {
    float *tile = reinterpret_cast<float *>(key) + slot / LANES * dim * LANES + slot % LANES;
    for (int64_t d = 0; d < dim; ++d) tile[d * LANES] = k[d];
    std::memcpy(reinterpret_cast<float *>(val) + slot * dim, v, size_t(dim) * 4);
  }

  static void query(const float *q, int64_t dim, float *out) {
    std::memcpy(out, q, size_t(dim) * 4);
  }

  template <int Q, int B>
  static void scores(const uint8_t *tiles, int64_t dim, const float *const *q, f32x16 (&acc)[Q][B]) {
    const float *t = reinterpret_cast<const float *>(tiles);
    for (int64_t d = 0; d < dim; ++d) {
      f32x16 k[B];
      for (int b = 0; b < B; ++b) k[b] = load(t + (b * dim + d) * LANES);
      for (int i = 0; i < Q; ++i) {
        const f32x16 x = all(q[i][d]);
        for (int b = 0; b < B; ++b) acc[i][b] = fma(k[b], x, acc[i][b]);
      }
    }
  }
};

template <> struct Cache<true> {
  static constexpr int64_t BYTES = 2;

  static f32x16 values(const uint8_t *p) {
#if HASTEN_AVX512
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p));
    return (f32x16)_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16);
#else
    f32x16 out;
    for (int i = 0; i < LANES; ++i) out[i] = from_bf16(reinterpret_cast<const uint16_t *>(p)[i]);
    return out;
#endif
  }

  static void put(uint8_t *key, uint8_t *val, int64_t dim, int64_t slot, const float *k,
                  const float *v) {
    uint16_t *tile = reinterpret_cast<uint16_t *>(key) + slot / LANES * dim * LANES;
    for (int64_t d = 0; d < dim; ++d)
      tile[d / 2 * 2 * LANES + slot % LANES * 2 + d % 2] = to_bf16(k[d]);
    uint16_t *row = reinterpret_cast<uint16_t *>(val) + slot * dim;
    for (int64_t d = 0; d < dim; ++d) row[d] = to_bf16(v[d]);
  }

  static void query(const float *q, int64_t dim, float *out) {
    uint16_t *half = reinterpret_cast<uint16_t *>(out);
    for (int64_t d = 0; d < dim; ++d) half[d] = to_bf16(q[d]);
  }

  template <int Q, int B>
  static void scores(const uint8_t *tiles, int64_t dim, const float *const *q, f32x16 (&acc)[Q][B]) {
    for (int64_t d = 0; d < dim / 2; ++d) {
      u32x16 k[B];
      for (int b = 0; b < B; ++b) k[b] = load_u32(tiles + (b * dim / 2 + d) * 64);
      for (int i = 0; i < Q; ++i) {
        const u32x16 x = all_u32(q[i] + d);
        for (int b = 0; b < B; ++b) acc[i][b] = dot_bf16(k[b], x, acc[i][b]);
      }
    }
  }
};

// Scores of Q queries with `slots` slots; writes up to 15 numbers past them.
template <bool HALF, int Q, int B>
inline void score_slots(const uint8_t *keys, int64_t dim, int64_t slots, const float *const *q,
                        float *const *out) {
  const int64_t bytes = dim * LANES * Cache<HALF>::BYTES;
  int64_t slot = 0;
  for (; slot + (B - 1) * LANES < slots; slot += B * LANES) {
    f32x16 acc[Q][B] = {};
    Cache<HALF>::template scores<Q, B>(keys + slot / LANES * bytes, dim, q, acc);
    for (int i = 0; i < Q; ++i)
      for (int b = 0; b < B; ++b) store(out[i] + slot + b * LANES, acc[i][b]);
  }
  for (; slot < slots; slot += LANES) {
    f32x16 acc[Q][1] = {};
    Cache<HALF>::template scores<Q, 1>(keys + slot / LANES * bytes, dim, q, acc);
    for (int i = 0; i < Q; ++i) store(out[i] + slot, acc[i][0]);
  }
}

// Scores to weights, not yet divided by their sum, which is returned. Room for 15 more.
inline float soften(float *scores, int64_t n) {
  for (int64_t i = n; i < (n + LANES - 1) / LANES * LANES; ++i)
    scores[i] = -std::numeric_limits<float>::infinity();
  f32x16 top = all(scores[0]);
  for (int64_t i = 0; i < n; i += LANES) top = max(top, load(scores + i));
  const f32x16 highest = all(max(top));
  f32x16 total = {};
  for (int64_t i = 0; i < n; i += LANES) {
    const f32x16 weight = exp(load(scores + i) - highest);
    store(scores + i, weight);
    total += weight;
  }
  return sum(total);
}

template <bool HALF, int Q, int N>
inline void mix_slots(const uint8_t *values, int64_t dim, int64_t slots, const float *const *weights,
                      f32x16 (&acc)[Q][N]) {
  for (int64_t s = 0; s < slots; ++s) {
    f32x16 v[N];
    for (int j = 0; j < N; ++j)
      v[j] = Cache<HALF>::values(values + (s * dim + j * LANES) * Cache<HALF>::BYTES);
    for (int i = 0; i < Q; ++i) {
      const f32x16 w = all(weights[i][s]);
      for (int j = 0; j < N; ++j) acc[i][j] = fma(v[j], w, acc[i][j]);
    }
  }
}

struct Scratch {
  std::vector<float> scores, pending, queries;
  std::vector<int32_t> seen;
};

// What attention needs to know of the model and of the layer.
struct Place {
  int64_t heads, kv_heads, dim, layer;
};

template <bool HALF>
inline const uint8_t *head_of(const Part &part, const Place &p, int64_t head) {
  return part.base +
         (p.layer * 2 * p.kv_heads + head) * part.capacity * p.dim * Cache<HALF>::BYTES;
}

// N vectors of features of Q queries' mix, from feature `at` on.
template <bool HALF, int Q, int N>
inline void mix(const Sequence &s, const Place &p, int64_t kv_head, int64_t at,
                const float *const *weights, const int32_t *const *seen, const int64_t *count,
                const float *scale, float *const *out) {
  f32x16 acc[Q][N] = {};
  const float *w[Q];
  for (int i = 0; i < Q; ++i) w[i] = weights[i];
  const int64_t skip = at * Cache<HALF>::BYTES;
  for (int64_t part = 0; part < s.count; ++part) {
    const Part &place = s.parts[part];
    const int64_t slots = part + 1 < s.count ? place.slots : s.committed;
    const uint8_t *values = head_of<HALF>(place, p, p.kv_heads + kv_head) + skip;
    mix_slots<HALF, Q, N>(values, p.dim, slots, w, acc);
    for (int i = 0; i < Q; ++i) w[i] += slots;
  }
  const uint8_t *tail = head_of<HALF>(s.parts[s.count - 1], p, p.kv_heads + kv_head) + skip;
  for (int i = 0; i < Q; ++i)
    for (int64_t j = 0; j < count[i]; ++j) {
      const uint8_t *row = tail + (s.committed + seen[i][j]) * p.dim * Cache<HALF>::BYTES;
      const f32x16 weight = all(w[i][j]);
      for (int n = 0; n < N; ++n)
        acc[i][n] = fma(Cache<HALF>::values(row + n * LANES * Cache<HALF>::BYTES), weight, acc[i][n]);
    }
  for (int i = 0; i < Q; ++i)
    for (int n = 0; n < N; ++n) store(out[i] + at + n * LANES, acc[i][n] * all(scale[i]));
}

// Q queries of key head `kv_head`. q[i] and out[i] hold `dim` floats, rows[i] is a query's row.
template <bool HALF, int Q>
inline void attend(const Sequence &s, const Place &p, int64_t kv_head, const float *const *q,
                   const int64_t *rows, float *const *out, Scratch &scratch) {
  constexpr int B = Q == 1 ? 4 : Q <= 3 ? 2 : 1;
  const Part &tail = s.parts[s.count - 1];
  int64_t past = s.committed;
  for (int64_t part = 0; part + 1 < s.count; ++part) past += s.parts[part].slots;
  const int64_t room = past + s.pending + 2 * LANES, wide = s.pending + 2 * LANES;
  scratch.scores.resize(size_t(Q * room));
  scratch.pending.resize(size_t(Q * wide));
  scratch.queries.resize(size_t(Q * p.dim));
  scratch.seen.resize(size_t(Q * s.pending));
  float *scores[Q], *at[Q], *fresh[Q];
  const float *query[Q];
  for (int i = 0; i < Q; ++i) {
    Cache<HALF>::query(q[i], p.dim, scratch.queries.data() + i * p.dim);
    query[i] = scratch.queries.data() + i * p.dim;
    scores[i] = at[i] = scratch.scores.data() + i * room;
    fresh[i] = scratch.pending.data() + i * wide;
  }
  for (int64_t part = 0; part < s.count; ++part) {
    const int64_t slots = part + 1 < s.count ? s.parts[part].slots : s.committed;
    score_slots<HALF, Q, B>(head_of<HALF>(s.parts[part], p, kv_head), p.dim, slots, query, at);
    for (int i = 0; i < Q; ++i) at[i] += slots;
  }
  const int64_t offset = s.committed % LANES;
  const uint8_t *keys = head_of<HALF>(tail, p, kv_head) +
                        (s.committed - offset) * p.dim * Cache<HALF>::BYTES;
  score_slots<HALF, Q, B>(keys, p.dim, offset + s.pending, query, fresh);
  const int32_t *seen[Q];
  int64_t count[Q];
  float scale[Q];
  const float *weights[Q];
  for (int i = 0; i < Q; ++i) {
    int32_t *list = scratch.seen.data() + i * s.pending;
    const int64_t row = rows[i], last = s.pending - s.rows + row;
    int64_t n = 0;
    for (int64_t j = 0; j < s.pending; ++j)
      if (s.mask ? s.mask[row * s.pending + j] == 0.0f : j <= last) {
        at[i][n] = fresh[i][offset + j];
        list[n++] = int32_t(j);
      }
    seen[i] = list;
    count[i] = n;
    scale[i] = 1.0f / soften(scores[i], past + n);
    weights[i] = scores[i];
  }
  int64_t feature = 0;
  for (; feature + 4 * LANES <= p.dim; feature += 4 * LANES)
    mix<HALF, Q, 4>(s, p, kv_head, feature, weights, seen, count, scale, out);
  for (; feature < p.dim; feature += LANES)
    mix<HALF, Q, 1>(s, p, kv_head, feature, weights, seen, count, scale, out);
}

}  // namespace hasten
