// Sixteen floats at a time. Every operation is a function of its lanes alone, in one fixed order, so
// a row's bits never depend on what else is in a pass. HASTEN_PORTABLE leaves the intrinsics out.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) && defined(__AVX512BW__) && !defined(HASTEN_PORTABLE)
#define HASTEN_AVX512 1
#include <immintrin.h>
#endif

namespace hasten {

constexpr int LANES = 16;

typedef float f32x16 __attribute__((vector_size(64), aligned(4)));
typedef int32_t i32x16 __attribute__((vector_size(64), aligned(4)));
typedef uint32_t u32x16 __attribute__((vector_size(64), aligned(4)));

inline f32x16 load(const float *p) { return *reinterpret_cast<const f32x16 *>(p); }
inline void store(float *p, f32x16 v) { *reinterpret_cast<f32x16 *>(p) = v; }

// By its bits: a sum with zeros would be made, as it turns -0 into 0.
inline f32x16 all(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return (f32x16)(u32x16{} + bits);
}

inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
#if HASTEN_AVX512
  return (f32x16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
  return a * b + c;
#endif
}

inline f32x16 max(f32x16 a, f32x16 b) { return a > b ? a : b; }

// The sum of all lanes, halves added to halves.
inline float sum(f32x16 v) {
  float x[LANES];
  store(x, v);
  for (int half = LANES / 2; half; half /= 2)
    for (int i = 0; i < half; ++i) x[i] += x[i + half];
  return x[0];
}

inline float max(f32x16 v) {
  float x[LANES], top;
  store(x, v);
  top = x[0];
  for (int i = 1; i < LANES; ++i) top = x[i] > top ? x[i] : top;
  return top;
}

// e to the power of x for x <= 0: within 2 units in the last place; 0 below -87.
inline f32x16 exp(f32x16 x) {
  const f32x16 low = all(-87.0f);
  const f32x16 y = x < low ? low : x;
  const f32x16 shift = all(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
  const f32x16 scaled = fma(y, all(1.44269504088896341f), shift);
  const f32x16 n = scaled - shift;
  f32x16 r = fma(n, all(-0.693359375f), y);
  r = fma(n, all(2.12194440e-4f), r);
  f32x16 p = all(1.9875691500e-4f);
  p = fma(p, r, all(1.3981999507e-3f));
  p = fma(p, r, all(8.3334519073e-3f));
  p = fma(p, r, all(4.1665795894e-2f));
  p = fma(p, r, all(1.6666665459e-1f));
  p = fma(p, r, all(5.0000001201e-1f));
  p = fma(p, r * r, r + all(1.0f));
  const i32x16 power = (__builtin_convertvector(n, i32x16) + 127) << 23;
  const f32x16 out = p * (f32x16)power;
  return x < low ? f32x16{} : out;
}

inline float from_bf16(uint16_t x) {
  const uint32_t bits = uint32_t(x) << 16;
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}

// To the nearest, ties to even; NaN stays NaN.
inline uint16_t to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return uint16_t((bits >> 16) | 0x40);
  return uint16_t((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

// Whether products of bfloat16 are an instruction.
#if HASTEN_AVX512 && defined(__AVX512BF16__)
constexpr bool BF16_PRODUCTS = true;
#else
constexpr bool BF16_PRODUCTS = false;
#endif

// Of two bfloat16 a lane, the first and the second ones.
inline f32x16 firsts(u32x16 a) { return (f32x16)(a << 16); }
inline f32x16 seconds(u32x16 a) { return (f32x16)(a & 0xffff0000u); }

// Two bfloat16 a lane: c + the sum of both products.
inline f32x16 dot_bf16(u32x16 a, u32x16 b, f32x16 c) {
#if HASTEN_AVX512 && defined(__AVX512BF16__)
  return (f32x16)_mm512_dpbf16_ps((__m512)c, (__m512bh)a, (__m512bh)b);
#else
  return fma(firsts(a), firsts(b), fma(seconds(a), seconds(b), c));
#endif
}

// Four bytes a lane, unsigned times signed: c + the sum of the products, exact.
inline i32x16 dot_u8s8(u32x16 a, u32x16 b, i32x16 c) {
#if HASTEN_AVX512 && defined(__AVX512VNNI__)
  return (i32x16)_mm512_dpbusd_epi32((__m512i)c, (__m512i)a, (__m512i)b);
#else
  for (int byte = 0; byte < 4; ++byte) {
    const i32x16 x = (i32x16)((a >> (8 * byte)) & 0xffu);
    const i32x16 y = (i32x16)(b << (24 - 8 * byte)) >> 24;
    c += x * y;
  }
  return c;
#endif
}

inline u32x16 load_u32(const void *p) { return *reinterpret_cast<const u32x16 *>(p); }

inline u32x16 all_u32(const void *p) {
  uint32_t x;
  std::memcpy(&x, p, 4);
  return u32x16{} + x;
}

// Sixteen signed bytes.
inline f32x16 load_s8(const uint8_t *p) {
#if HASTEN_AVX512
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i *>(p));
  return (f32x16)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
#else
  f32x16 out;
  for (int i = 0; i < LANES; ++i) out[i] = float(int8_t(p[i]));
  return out;
#endif
}

// Sixteen halves (IEEE float16).
inline f32x16 load_f16(const uint16_t *p) {
#if HASTEN_AVX512
  return (f32x16)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
#else
  f32x16 out;
  for (int i = 0; i < LANES; ++i) {
    const uint32_t sign = uint32_t(p[i] & 0x8000) << 16, rest = p[i] & 0x7fff;
    uint32_t bits = (rest << 13) + (112u << 23);
    float x;
    if (rest >= 0x7c00) bits += 112u << 23;  // infinity and NaN
    std::memcpy(&x, &bits, 4);
    if (rest < 0x400) x = float(rest) * 5.9604644775390625e-8f;  // subnormal: units of 2^-24
    std::memcpy(&bits, &x, 4);
    bits |= sign;
    std::memcpy(&x, &bits, 4);
    out[i] = x;
  }
  return out;
#endif
}

}  // namespace hasten
