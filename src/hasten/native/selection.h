// The largest of each row of logits, in one look at it.
#pragma once

#include <limits>

#include "simd.h"

namespace hasten {

// The larger of both in each lane; where `a` is NaN, `b`.
inline f32x16 larger(f32x16 a, f32x16 b) {
#if HASTEN_AVX512
  return (f32x16)_mm512_max_ps((__m512)a, (__m512)b);
#else
  return max(a, b);
#endif
}

// Lanes where a > x, as bits (or any other number that isn't 0).
inline uint32_t above(f32x16 a, float x) {
#if HASTEN_AVX512
  return _mm512_cmp_ps_mask((__m512)a, (__m512)all(x), _CMP_GT_OQ);
#else
  uint32_t found = 0;
  const i32x16 over = a > all(x);
  for (int lane = 0; lane < LANES; ++lane) found |= uint32_t(over[lane]);
  return found;
#endif
}

// Not 0 when a or b holds NaN.
inline uint32_t nan_in(f32x16 a, f32x16 b) {
#if HASTEN_AVX512
  return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_UNORD_Q);
#else
  uint32_t found = 0;
  const i32x16 broken = (a != a) | (b != b);
  for (int lane = 0; lane < LANES; ++lane) found |= uint32_t(broken[lane]);
  return found;
#endif
}

// The k <= n largest of x, largest first, the lowest id first among equals: values and ids. False
// when x holds NaN; what is written then means nothing.
inline bool largest(const float *x, int64_t n, int64_t k, float *values, int64_t *ids) {
  int64_t held = 0;
  float least = -std::numeric_limits<float>::infinity();  // what another one has to exceed
  const auto offer = [&](int64_t id) {
    const float value = x[id];
    if (held == k && !(value > least)) return;
    int64_t at = held < k ? held++ : k - 1;
    for (; at > 0 && value > values[at - 1]; --at) {
      values[at] = values[at - 1];
      ids[at] = ids[at - 1];
    }
    values[at] = value;
    ids[at] = id;
    if (held == k) least = values[k - 1];
  };
  constexpr int64_t STEP = 8 * LANES;
  uint32_t broken = 0;
  int64_t i = 0;
  for (; i < k; ++i) {
    if (x[i] != x[i]) return false;
    offer(i);
  }
  for (; i + STEP <= n; i += STEP) {
    f32x16 a = load(x + i), b = load(x + i + LANES);
    broken |= nan_in(a, b);
    for (int64_t j = 2 * LANES; j < STEP; j += 2 * LANES) {
      const f32x16 c = load(x + i + j), d = load(x + i + j + LANES);
      broken |= nan_in(c, d);
      a = larger(c, a);
      b = larger(d, b);
    }
    if (above(larger(a, b), least))
      for (int64_t j = 0; j < STEP; ++j) offer(i + j);
  }
  for (; i < n; ++i) {
    if (x[i] != x[i]) return false;
    offer(i);
  }
  return !broken;
}

}  // namespace hasten
