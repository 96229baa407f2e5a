// Products with a fixed weight, y = W x + b, for any number of rows.
//
// Weights lie in panels of two column blocks of 16 outputs, one output a lane, in units that take
// turns, so that a product reads one stream from its first byte to its last:
//   F32   unit: one k      [16]            float
//   BF16  unit: two k      [16][2]         bfloat16
//   Q8    unit: 32 k       [8][16][4] uint8; [16] half d; [16] half m       value = d q + m
//   Q4    unit: 32 k       [4][16][4] two nibbles; [16] half d; [16] half m
// [panel][unit][block], k up to its padded size, a multiple of 32, outputs to a multiple of 32. Each
// output is summed over k in order, one step after another, whatever the tile: rows and blocks of a
// tile share loads, never sums. Inputs of BF16 are rounded to bfloat16 (and lie as floats where its
// products aren't an instruction), those of Q8 and Q4 to 8 bits in groups of 32 with a scale of their
// own.
#pragma once

#include <vector>

#include "simd.h"

namespace hasten {

enum Kind : int32_t { F32 = 0, BF16 = 1, Q8 = 2, Q4 = 3 };

constexpr int GROUP = 32;

inline int64_t padded(int64_t k) { return (k + GROUP - 1) / GROUP * GROUP; }
inline int64_t panels_of(int64_t n) { return (n + 2 * LANES - 1) / (2 * LANES); }

// Features of k in a unit, and a unit's bytes.
inline int64_t unit_steps(int kind) { return kind == F32 ? 1 : kind == BF16 ? 2 : GROUP; }
inline int64_t unit_bytes(int kind) {
  return kind == Q8 ? GROUP * LANES + 64 : kind == Q4 ? GROUP * LANES / 2 + 64 : 64;
}
inline int64_t panel_bytes(int kind, int64_t k) {
  return padded(k) / unit_steps(kind) * 2 * unit_bytes(kind);
}

struct Linear {
  const uint8_t *weight;
  const float *bias;  // or null
  int64_t in, out;
  int32_t kind, unused;
};

// Memory for rows made ready for a product.
struct Buffer {
  std::vector<uint8_t> values;
  std::vector<float> scales, sums;

  void reserve(int64_t rows, int64_t k) {
    const size_t bytes = size_t(rows * padded(k) * 4), groups = size_t(rows * padded(k) / GROUP);
    if (values.size() < bytes) values.resize(bytes);
    if (scales.size() < groups) scales.resize(groups), sums.resize(groups);
  }
};

// Rows in the precision of a kind, padded with zeros; scales and sums of groups for Q8 and Q4.
struct Inputs {
  uint8_t *values;
  float *scales, *sums;
  int64_t stride, groups;  // bytes and groups a row
  int kind;

  Inputs(Buffer &b, int kind, int64_t k)
      : values(b.values.data()), scales(b.scales.data()), sums(b.sums.data()),
        stride(padded(k) * (kind == F32 ? 4 : kind == BF16 ? (BF16_PRODUCTS ? 2 : 4) : 1)),
        groups(padded(k) / GROUP), kind(kind) {}
};

// Rounds features from..to-1 of a row, whole groups; `x` holds those features, `k` is the row's size.
inline void prepare(const Inputs &in, int64_t row, const float *x, int64_t from, int64_t to,
                    int64_t k) {
  for (int64_t at = from; at < to; at += GROUP) {
    float group[GROUP] = {};
    const int64_t n = k - at < GROUP ? k - at : GROUP;
    std::memcpy(group, x + (at - from), size_t(n) * 4);
    uint8_t *out = in.values + row * in.stride;
    if (in.kind == F32) {
      std::memcpy(out + at * 4, group, sizeof group);
    } else if (in.kind == BF16 && !BF16_PRODUCTS) {
      float *to32 = reinterpret_cast<float *>(out) + at;
      for (int i = 0; i < GROUP; ++i) to32[i] = from_bf16(to_bf16(group[i]));
    } else if (in.kind == BF16) {
      uint16_t *to16 = reinterpret_cast<uint16_t *>(out) + at;
      for (int i = 0; i < GROUP; ++i) to16[i] = to_bf16(group[i]);
    } else {
      float top = 0, odd = 0;  // NaN where a number isn't finite: so is the scale, then
      for (int i = 0; i < GROUP; ++i) {
        top = std::fabs(group[i]) > top ? std::fabs(group[i]) : top;
        odd += group[i] * 0.0f;
      }
      const bool finite = odd == 0.0f;
      const float scale = finite ? top / 127.0f : odd;
      const float inverse = finite && top > 1e-30f ? 127.0f / top : 0.0f;
      int8_t *to8 = reinterpret_cast<int8_t *>(out) + at;
      int32_t total = 0;
      for (int i = 0; i < GROUP; ++i) {
        const int32_t q = finite ? int32_t(std::nearbyintf(group[i] * inverse)) : 0;
        to8[i] = int8_t(q);
        total += q;
      }
      const int64_t g = row * in.groups + at / GROUP;
      in.scales[g] = scale;
      in.sums[g] = scale * float(total);
    }
  }
}

// Asks for what a stream of weights holds a little further on: processors that look ahead by themselves
// don't look far enough where there are many products for each byte.
inline void look_ahead(const uint8_t *p) { __builtin_prefetch(p + 2048); }

// R rows by C blocks (whole panels, `panel` bytes apart) of one product; `acc` starts at 0.
template <int R, int C>
inline void tile_f32(const uint8_t *w, int64_t panel, int64_t k, const uint8_t *x, int64_t stride,
                     f32x16 (&acc)[R][C]) {
  for (int64_t i = 0; i < k; ++i) {
    f32x16 column[C];
    for (int c = 0; c < C; ++c) {
      const uint8_t *unit = w + c / 2 * panel + (2 * i + c % 2) * 64;
      column[c] = load(reinterpret_cast<const float *>(unit));
      look_ahead(unit);
    }
    for (int r = 0; r < R; ++r) {
      const f32x16 value = all(reinterpret_cast<const float *>(x + r * stride)[i]);
      for (int c = 0; c < C; ++c) acc[r][c] = fma(column[c], value, acc[r][c]);
    }
  }
}

template <int R, int C>
inline void tile_bf16(const uint8_t *w, int64_t panel, int64_t k, const uint8_t *x, int64_t stride,
                      f32x16 (&acc)[R][C]) {
  for (int64_t i = 0; i < k / 2; ++i) {
    u32x16 column[C];
    for (int c = 0; c < C; ++c) {
      const uint8_t *unit = w + c / 2 * panel + (2 * i + c % 2) * 64;
      column[c] = load_u32(unit);
      look_ahead(unit);
    }
    if (!BF16_PRODUCTS) {  // as `dot_bf16`, but a column is widened once for all rows
      f32x16 first[C], second[C];
      for (int c = 0; c < C; ++c) first[c] = firsts(column[c]), second[c] = seconds(column[c]);
      for (int r = 0; r < R; ++r) {
        const float *pair = reinterpret_cast<const float *>(x + r * stride) + 2 * i;
        for (int c = 0; c < C; ++c) acc[r][c] = fma(second[c], all(pair[1]), acc[r][c]);
        for (int c = 0; c < C; ++c) acc[r][c] = fma(first[c], all(pair[0]), acc[r][c]);
      }
      continue;
    }
    for (int r = 0; r < R; ++r) {
      const u32x16 value = all_u32(x + r * stride + i * 4);
      for (int c = 0; c < C; ++c) acc[r][c] = dot_bf16(column[c], value, acc[r][c]);
    }
  }
}

template <int BITS, int R, int C>
inline void tile_int(const uint8_t *w, int64_t panel, int64_t groups, const uint8_t *x,
                     int64_t stride, const float *scales, const float *sums, int64_t scale_stride,
                     f32x16 (&acc)[R][C]) {
  constexpr int64_t size = GROUP * LANES * BITS / 8 + 64;
  const u32x16 nibble = u32x16{} + 0x0f0f0f0fu;
  for (int64_t g = 0; g < groups; ++g) {
    const uint8_t *unit[C];
    for (int c = 0; c < C; ++c) unit[c] = w + c / 2 * panel + (2 * g + c % 2) * size;
    i32x16 whole[R][C] = {};
    for (int j = 0; j < BITS; ++j) {
      u32x16 low[C], high[C];
      for (int c = 0; c < C; ++c) {
        low[c] = load_u32(unit[c] + j * 64);
        look_ahead(unit[c] + j * 64);
        if (BITS == 4) high[c] = (low[c] >> 4) & nibble, low[c] &= nibble;
      }
      for (int r = 0; r < R; ++r) {
        const uint8_t *group = x + r * stride + g * GROUP + j * 4;
        const u32x16 first = all_u32(group);
        for (int c = 0; c < C; ++c) whole[r][c] = dot_u8s8(low[c], first, whole[r][c]);
        if (BITS == 4) {
          const u32x16 second = all_u32(group + GROUP / 2);
          for (int c = 0; c < C; ++c) whole[r][c] = dot_u8s8(high[c], second, whole[r][c]);
        }
      }
    }
    for (int c = 0; c < C; ++c) {
      const uint16_t *tail = reinterpret_cast<const uint16_t *>(unit[c] + size - 64);
      const f32x16 d = load_f16(tail), m = load_f16(tail + LANES);
      for (int r = 0; r < R; ++r) {
        const f32x16 number = __builtin_convertvector(whole[r][c], f32x16);
        acc[r][c] = fma(number, d * all(scales[r * scale_stride + g]), acc[r][c]);
        acc[r][c] = fma(m, all(sums[r * scale_stride + g]), acc[r][c]);
      }
    }
  }
}

// The rows' products with C / 2 panels from `first` on, written or added to `out` (rows of `lead`).
template <int R, int C>
inline void tile(const Linear &l, int64_t first, const Inputs &in, int64_t row, float *out,
                 int64_t lead, bool add) {
  f32x16 acc[R][C] = {};
  const int64_t panel = panel_bytes(l.kind, l.in);
  const uint8_t *w = l.weight + first * panel, *x = in.values + row * in.stride;
  const float *scales = in.scales + row * in.groups, *sums = in.sums + row * in.groups;
  switch (l.kind) {
    case F32: tile_f32<R, C>(w, panel, padded(l.in), x, in.stride, acc); break;
    case BF16: tile_bf16<R, C>(w, panel, padded(l.in), x, in.stride, acc); break;
    case Q8:
      tile_int<8, R, C>(w, panel, in.groups, x, in.stride, scales, sums, in.groups, acc);
      break;
    default:
      tile_int<4, R, C>(w, panel, in.groups, x, in.stride, scales, sums, in.groups, acc);
  }
  for (int c = 0; c < C; ++c) {
    const int64_t at = (2 * first + c) * LANES, n = l.out - at < LANES ? l.out - at : LANES;
    for (int r = 0; r < R; ++r) {
      float *to = out + (row + r) * lead + at;
      if (n == LANES) {
        const f32x16 y = l.bias ? acc[r][c] + load(l.bias + at) : acc[r][c];
        store(to, add ? load(to) + y : y);
        continue;
      }
      for (int64_t i = 0; i < n; ++i) {
        const float y = l.bias ? acc[r][c][i] + l.bias[at + i] : acc[r][c][i];
        to[i] = add ? to[i] + y : y;
      }
    }
  }
}

// Tiles of whole numbers are half as large: their sums take twice as many registers.
template <int R, int C>
inline void strip(const Linear &l, int64_t first, int64_t last, const Inputs &in, int64_t row,
                  float *out, int64_t lead, bool add) {
  if (R > 2 && C > 2 && (l.kind == Q8 || l.kind == Q4))
    return strip<R, 2>(l, first, last, in, row, out, lead, add);
  int64_t panel = first;
  for (; panel + C / 2 <= last; panel += C / 2) tile<R, C>(l, panel, in, row, out, lead, add);
  for (; panel < last; ++panel) tile<R, 2>(l, panel, in, row, out, lead, add);
}

// `rows` rows, at most 12.
inline void strip_of(int64_t rows, const Linear &l, int64_t first, int64_t last, const Inputs &in,
                     int64_t row, float *out, int64_t lead, bool add) {
  switch (rows) {
    case 1: strip<1, 4>(l, first, last, in, row, out, lead, add); break;
    case 2: strip<2, 4>(l, first, last, in, row, out, lead, add); break;
    case 3: strip<3, 4>(l, first, last, in, row, out, lead, add); break;
    case 4: strip<4, 4>(l, first, last, in, row, out, lead, add); break;
    case 5: strip<5, 2>(l, first, last, in, row, out, lead, add); break;
    case 6: strip<6, 2>(l, first, last, in, row, out, lead, add); break;
    case 7: strip<7, 2>(l, first, last, in, row, out, lead, add); break;
    case 8: strip<8, 2>(l, first, last, in, row, out, lead, add); break;
    case 9: strip<9, 2>(l, first, last, in, row, out, lead, add); break;
    case 10: strip<10, 2>(l, first, last, in, row, out, lead, add); break;
    case 11: strip<11, 2>(l, first, last, in, row, out, lead, add); break;
    case 12: strip<12, 2>(l, first, last, in, row, out, lead, add); break;
    default: break;
  }
}

// All rows' products with panels first..last-1. A panel stays in the near cache while the rows pass
// by, in tiles as even as may be that fill the registers.
inline void multiply(const Linear &l, const Inputs &in, int64_t rows, int64_t first, int64_t last,
                     float *out, int64_t lead, bool add) {
  const int64_t most = l.kind == Q8 || l.kind == Q4 ? 4 : 12;
  const int64_t tiles = (rows + most - 1) / most;
  const int64_t step = tiles > 1 ? 1 : last - first;
  for (int64_t panel = first; panel < last; panel += step)
    for (int64_t t = 0; t < tiles; ++t) {
      const int64_t row = rows * t / tiles, count = rows * (t + 1) / tiles - row;
      strip_of(count, l, panel, panel + step, in, row, out, lead, add);
    }
}

}  // namespace hasten
