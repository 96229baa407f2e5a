// Attention of some query vectors over one key head's cache.
//
// Keys lie in tiles of 16 slots, a slot a lane, values by slot:
//   FLOAT32   [slot / 16][dim][16] float                     [slot][dim] float
//   BFLOAT16  [slot / 16][dim / 2][16][2] bfloat16           [slot][dim] bfloat16
//   INT8      [slot / 16]: [dim][16] int8, [16] float scale  [slot]: [dim] int8, float scale
// A slot of a head has as many bytes for its key as for its value, and in 8 bits a scale for each,
// whatever stands beside it. A query sees every committed slot and, of the pending ones, those on
// its own path, in order. Scores are sums over the features in order, weights are summed by position
// modulo 16, the mix goes over positions in order: a query's bits depend on what it sees and on
// nothing else, be it in a tree, a chain, a batch, or alone.
#pragma once

#include <limits>
#include <type_traits>
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

// What keys and values are stored as.
enum class Stored : int64_t { FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2 };

inline Stored stored(bool half) { return half ? Stored::BFLOAT16 : Stored::FLOAT32; }

// Copies a slot's lane of n rows of lanes, BYTES each, that begin `at` bytes within a tile.
template <int BYTES>
inline void copy_lanes(uint8_t *keys, int64_t tile, int64_t at, int64_t n, int64_t from, int64_t to) {
  const uint8_t *old = keys + from / LANES * tile + at + from % LANES * BYTES;
  uint8_t *place = keys + to / LANES * tile + at + to % LANES * BYTES;
  for (int64_t i = 0; i < n * LANES * BYTES; i += LANES * BYTES)
    std::memcpy(place + i, old + i, BYTES);
}

template <Stored S> struct Cache;

template <> struct Cache<Stored::FLOAT32> {
  // Of a slot of one head.
  static int64_t bytes(int64_t dim) { return dim * 4; }

  // Sixteen features of a slot's value, from feature `at` on.
  static f32x16 values(const uint8_t *row, int64_t dim, int64_t at) {
    return load(reinterpret_cast<const float *>(row) + at);
  }

  static void move_key(uint8_t *keys, int64_t dim, int64_t from, int64_t to) {
    copy_lanes<4>(keys, LANES * bytes(dim), 0, dim, from, to);
  }

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

template <> struct Cache<Stored::BFLOAT16> {
  static int64_t bytes(int64_t dim) { return dim * 2; }

  static f32x16 values(const uint8_t *row, int64_t dim, int64_t at) {
    const uint16_t *p = reinterpret_cast<const uint16_t *>(row) + at;
#if HASTEN_AVX512
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p));
    return (f32x16)_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16);
#else
    f32x16 out;
    for (int i = 0; i < LANES; ++i) out[i] = from_bf16(p[i]);
    return out;
#endif
  }

  // A lane holds a pair of features.
  static void move_key(uint8_t *keys, int64_t dim, int64_t from, int64_t to) {
    copy_lanes<4>(keys, LANES * bytes(dim), 0, dim / 2, from, to);
  }

  static void put(uint8_t *key, uint8_t *val, int64_t dim, int64_t slot, const float *k,
                  const float *v) {
    uint16_t *tile = reinterpret_cast<uint16_t *>(key) + slot / LANES * dim * LANES;
    for (int64_t d = 0; d < dim; ++d)
      tile[d / 2 * 2 * LANES + slot % LANES * 2 + d % 2] = to_bf16(k[d]);
    uint16_t *row = reinterpret_cast<uint16_t *>(val) + slot * dim;
    for (int64_t d = 0; d < dim; ++d) row[d] = to_bf16(v[d]);
  }

  // Rounded; as floats where products of bfloat16 aren't an instruction.
  static void query(const float *q, int64_t dim, float *out) {
    if (!BF16_PRODUCTS) {
      for (int64_t d = 0; d < dim; ++d) out[d] = from_bf16(to_bf16(q[d]));
      return;
    }
    uint16_t *half = reinterpret_cast<uint16_t *>(out);
    for (int64_t d = 0; d < dim; ++d) half[d] = to_bf16(q[d]);
  }

  template <int Q, int B>
  static void scores(const uint8_t *tiles, int64_t dim, const float *const *q, f32x16 (&acc)[Q][B]) {
    for (int64_t d = 0; d < dim / 2; ++d) {
      u32x16 k[B];
      for (int b = 0; b < B; ++b) k[b] = load_u32(tiles + (b * dim / 2 + d) * 64);
      if (!BF16_PRODUCTS) {  // as `dot_bf16`, but a pair of keys is widened once for all queries
        f32x16 first[B], second[B];
        for (int b = 0; b < B; ++b) first[b] = firsts(k[b]), second[b] = seconds(k[b]);
        for (int i = 0; i < Q; ++i)
          for (int b = 0; b < B; ++b)
            acc[i][b] = fma(first[b], all(q[i][2 * d]), fma(second[b], all(q[i][2 * d + 1]), acc[i][b]));
        continue;
      }
      for (int i = 0; i < Q; ++i) {
        const u32x16 x = all_u32(q[i] + d);
        for (int b = 0; b < B; ++b) acc[i][b] = dot_bf16(k[b], x, acc[i][b]);
      }
    }
  }
};

template <> struct Cache<Stored::INT8> {
  static int64_t bytes(int64_t dim) { return dim + 4; }

  static f32x16 values(const uint8_t *row, int64_t dim, int64_t at) {
    float scale;
    std::memcpy(&scale, row + dim, 4);
    return load_s8(row + at) * all(scale);
  }

  static void move_key(uint8_t *keys, int64_t dim, int64_t from, int64_t to) {
    copy_lanes<1>(keys, LANES * bytes(dim), 0, dim, from, to);
    copy_lanes<4>(keys, LANES * bytes(dim), LANES * dim, 1, from, to);
  }

  static void put(uint8_t *key, uint8_t *val, int64_t dim, int64_t slot, const float *k,
                  const float *v) {
    uint8_t *tile = key + slot / LANES * LANES * bytes(dim);
    const float scale = round(k, dim, tile + slot % LANES, LANES);
    std::memcpy(tile + dim * LANES + slot % LANES * 4, &scale, 4);
    uint8_t *row = val + slot * bytes(dim);
    const float other = round(v, dim, row, 1);
    std::memcpy(row + dim, &other, 4);
  }

  static void query(const float *q, int64_t dim, float *out) {
    std::memcpy(out, q, size_t(dim) * 4);
  }

  template <int Q, int B>
  static void scores(const uint8_t *tiles, int64_t dim, const float *const *q, f32x16 (&acc)[Q][B]) {
    const int64_t tile = LANES * bytes(dim);
    for (int64_t d = 0; d < dim; ++d) {
      f32x16 k[B];
      for (int b = 0; b < B; ++b) k[b] = load_s8(tiles + b * tile + d * LANES);
      for (int i = 0; i < Q; ++i) {
        const f32x16 x = all(q[i][d]);
        for (int b = 0; b < B; ++b) acc[i][b] = fma(k[b], x, acc[i][b]);
      }
    }
    for (int b = 0; b < B; ++b) {
      const f32x16 scale = load(reinterpret_cast<const float *>(tiles + b * tile + dim * LANES));
      for (int i = 0; i < Q; ++i) acc[i][b] *= scale;
    }
  }

 private:
  // A vector as bytes, `step` apart, and what 1 is worth: the largest is 127 or -127. Where a number
  // isn't finite that is NaN, so that the whole vector is, and nothing else.
  static float round(const float *x, int64_t dim, uint8_t *out, int64_t step) {
    f32x16 top = {}, odd = {};
    for (int64_t d = 0; d < dim; d += LANES) {
      const f32x16 number = load(x + d);
      top = max(number < 0.0f ? -number : number, top);
      odd += number * 0.0f;
    }
    const float most = max(top), rest = sum(odd);
    const float inverse = rest == 0.0f && most > 1e-30f ? 127.0f / most : 0.0f;
    for (int64_t d = 0; d < dim; ++d)
      out[d * step] = inverse > 0.0f ? uint8_t(int8_t(std::nearbyintf(x[d] * inverse))) : 0;
    return rest == 0.0f ? most / 127.0f : rest;
  }
};

// Calls `f` with what is stored as a constant: `decltype(s)::value` of its argument.
template <class F> inline auto with(Stored s, const F &f) {
  switch (s) {
    case Stored::INT8: return f(std::integral_constant<Stored, Stored::INT8>());
    case Stored::BFLOAT16: return f(std::integral_constant<Stored, Stored::BFLOAT16>());
    default: return f(std::integral_constant<Stored, Stored::FLOAT32>());
  }
}

// Of a slot of one head, keys or values.
inline int64_t slot_bytes(Stored s, int64_t dim) {
  return with(s, [&](auto kind) { return Cache<decltype(kind)::value>::bytes(dim); });
}

// Writes a slot of one head, whose keys and values are these.
inline void write_slot(Stored s, uint8_t *keys, uint8_t *values, int64_t dim, int64_t slot,
                       const float *key, const float *value) {
  with(s, [&](auto kind) {
    Cache<decltype(kind)::value>::put(keys, values, dim, slot, key, value);
  });
}

// Scores of Q queries with `slots` slots; writes up to 15 numbers past them.
template <Stored S, int Q, int B>
inline void score_slots(const uint8_t *keys, int64_t dim, int64_t slots, const float *const *q,
                        float *const *out) {
  const int64_t tile = LANES * Cache<S>::bytes(dim);
  int64_t slot = 0;
  for (; slot + (B - 1) * LANES < slots; slot += B * LANES) {
    f32x16 acc[Q][B] = {};
    Cache<S>::template scores<Q, B>(keys + slot / LANES * tile, dim, q, acc);
    for (int i = 0; i < Q; ++i)
      for (int b = 0; b < B; ++b) store(out[i] + slot + b * LANES, acc[i][b]);
  }
  for (; slot < slots; slot += LANES) {
    f32x16 acc[Q][1] = {};
    Cache<S>::template scores<Q, 1>(keys + slot / LANES * tile, dim, q, acc);
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

template <Stored S, int Q, int N>
inline void mix_slots(const uint8_t *values, int64_t dim, int64_t at, int64_t slots,
                      const float *const *weights, f32x16 (&acc)[Q][N]) {
  for (int64_t s = 0; s < slots; ++s) {
    const uint8_t *row = values + s * Cache<S>::bytes(dim);
    f32x16 v[N];
    for (int j = 0; j < N; ++j) v[j] = Cache<S>::values(row, dim, at + j * LANES);
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

template <Stored S>
inline const uint8_t *head_of(const Part &part, const Place &p, int64_t head) {
  return part.base + (p.layer * 2 * p.kv_heads + head) * part.capacity * Cache<S>::bytes(p.dim);
}

// N vectors of features of Q queries' mix, from feature `at` on.
template <Stored S, int Q, int N>
inline void mix(const Sequence &s, const Place &p, int64_t kv_head, int64_t at,
                const float *const *weights, const int32_t *const *seen, const int64_t *count,
                const float *scale, float *const *out) {
  f32x16 acc[Q][N] = {};
  const float *w[Q];
  for (int i = 0; i < Q; ++i) w[i] = weights[i];
  for (int64_t part = 0; part < s.count; ++part) {
    const Part &place = s.parts[part];
    const int64_t slots = part + 1 < s.count ? place.slots : s.committed;
    const uint8_t *values = head_of<S>(place, p, p.kv_heads + kv_head);
    mix_slots<S, Q, N>(values, p.dim, at, slots, w, acc);
    for (int i = 0; i < Q; ++i) w[i] += slots;
  }
  const uint8_t *tail = head_of<S>(s.parts[s.count - 1], p, p.kv_heads + kv_head);
  for (int i = 0; i < Q; ++i)
    for (int64_t j = 0; j < count[i]; ++j) {
      const uint8_t *row = tail + (s.committed + seen[i][j]) * Cache<S>::bytes(p.dim);
      const f32x16 weight = all(w[i][j]);
      for (int n = 0; n < N; ++n)
        acc[i][n] = fma(Cache<S>::values(row, p.dim, at + n * LANES), weight, acc[i][n]);
    }
  for (int i = 0; i < Q; ++i)
    for (int n = 0; n < N; ++n) store(out[i] + at + n * LANES, acc[i][n] * all(scale[i]));
}

// Q queries of key head `kv_head`. q[i] and out[i] hold `dim` floats, rows[i] is a query's row.
template <Stored S, int Q>
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
    Cache<S>::query(q[i], p.dim, scratch.queries.data() + i * p.dim);
    query[i] = scratch.queries.data() + i * p.dim;
    scores[i] = at[i] = scratch.scores.data() + i * room;
    fresh[i] = scratch.pending.data() + i * wide;
  }
  for (int64_t part = 0; part < s.count; ++part) {
    const int64_t slots = part + 1 < s.count ? s.parts[part].slots : s.committed;
    score_slots<S, Q, B>(head_of<S>(s.parts[part], p, kv_head), p.dim, slots, query, at);
    for (int i = 0; i < Q; ++i) at[i] += slots;
  }
  const int64_t offset = s.committed % LANES;
  const uint8_t *keys =
      head_of<S>(tail, p, kv_head) + (s.committed - offset) * Cache<S>::bytes(p.dim);
  score_slots<S, Q, B>(keys, p.dim, offset + s.pending, query, fresh);
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
    mix<S, Q, 4>(s, p, kv_head, feature, weights, seen, count, scale, out);
  for (; feature < p.dim; feature += LANES)
    mix<S, Q, 1>(s, p, kv_head, feature, weights, seen, count, scale, out);
}

}  // namespace hasten
