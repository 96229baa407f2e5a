// The likeliest ids of rows, by a draft vocabulary's head.
#pragma once

#include <limits>

#include "selection.h"
#include "steps.h"

namespace hasten {

// Logits of a draft vocabulary: those of a product, then those of some rows as they are.
struct Head {
  Linear product;
  const void *extra;  // (extras, size), bfloat16 or floats
  int64_t extras;
  const int64_t *ids;  // what all logits stand for
};

// One thread's best of a row's logits, and the sum of the exponentials over `top`.
struct Best {
  float top, total;
  int64_t count;
  bool broken;
};

// Memory for a vote.
struct Ballots {
  std::vector<float> logits, values;
  std::vector<int64_t> places;
  std::vector<Best> best;

  void reserve(const Head &head, int64_t rows, int64_t threads, int64_t width) {
    room(logits, rows * (head.product.out + head.extras));
    room(best, rows * threads * 2);
    room(values, rows * threads * 2 * width);
    room(places, rows * threads * 2 * width);
  }
};

inline float dot(const float *x, const void *row, bool half, int64_t n) {
  f32x16 products = {};
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) {
    const uint8_t *at = static_cast<const uint8_t *>(row);
    const f32x16 y = half ? Cache<Stored::BFLOAT16>::values(at, n, i)
                          : Cache<Stored::FLOAT32>::values(at, n, i);
    products = fma(load(x + i), y, products);
  }
  float total = sum(products);
  for (; i < n; ++i)
    total += x[i] * (half ? from_bf16(static_cast<const uint16_t *>(row)[i])
                          : static_cast<const float *>(row)[i]);
  return total;
}

// The `width` likeliest ids of some rows. Each thread looks at the logits that it made.
class Vote {
 public:
  // ids (rows, width), -1 where a row says nothing: its logits hold NaN or, where chances are wanted,
  // aren't finite; chances (rows, width), or null.
  Vote(const Thread &t, const Head &head, Ballots &ballots, int64_t width, float *chances,
       int64_t *ids)
      : t_(t), head_(head), b_(ballots), known_(head.product.out),
        all_(head.product.out + head.extras), width_(width), chances_(chances), ids_(ids) {}

  // Of rows made ready as `in`, which are also given as floats.
  void run(const Inputs &in, const float *rows, int64_t count, bool half) {
    const int64_t n = head_.product.in;
    const Share panels = t_.share(panels_of(known_)), extras = t_.share(head_.extras);
    multiply(head_.product, in, count, panels.first, panels.last, b_.logits.data(), all_, false);
    for (int64_t e = extras.first; e < extras.last; ++e) {
      const uint8_t *row = static_cast<const uint8_t *>(head_.extra) + e * n * (half ? 2 : 4);
      for (int64_t i = 0; i < count; ++i)
        b_.logits[size_t(i * all_ + known_ + e)] = dot(rows + i * n, row, half, n);
    }
    const int64_t first = std::min(known_, panels.first * 2 * LANES);
    const int64_t last = std::min(known_, panels.last * 2 * LANES);
    for (int64_t i = 0; i < count; ++i) {
      look(i, 0, first, last);
      look(i, 1, known_ + extras.first, known_ + extras.last);
    }
    t_.wait();
    const Share mine = t_.share(count);
    for (int64_t i = mine.first; i < mine.last; ++i) choose(i);
  }

 private:
  // The best of logits first..last-1 of a row, in this thread's place for them.
  void look(int64_t row, int64_t part, int64_t first, int64_t last) {
    const int64_t at = (row * t_.threads + t_.me) * 2 + part, n = last - first;
    Best &best = b_.best[size_t(at)];
    best = {-std::numeric_limits<float>::infinity(), 0.0f, std::min(n, width_), false};
    if (!n) return;
    const float *x = b_.logits.data() + row * all_ + first;
    float *values = b_.values.data() + at * width_;
    int64_t *places = b_.places.data() + at * width_;
    best.broken = !largest(x, n, best.count, values, places);
    if (best.broken) return;
    best.top = values[0];
    if (chances_) best.total = exponentials(x, n, best.top);
    for (int64_t j = 0; j < best.count; ++j) places[j] += first;
  }

  static float exponentials(const float *x, int64_t n, float top) {
    f32x16 some = {};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) some += exp(load(x + i) - all(top));
    float total = sum(some);
    for (; i < n; ++i) total += std::exp(x[i] - top);
    return total;
  }

  // The best of all threads' best, largest first, and the lowest place first among equals.
  void choose(int64_t row) {
    const int64_t begin = row * t_.threads * 2, end = begin + t_.threads * 2;
    float top = -std::numeric_limits<float>::infinity(), total = 0.0f;
    bool broken = false;
    for (int64_t b = begin; b < end; ++b) {
      top = std::max(top, b_.best[size_t(b)].top);
      broken |= b_.best[size_t(b)].broken;
    }
    if (chances_) {
      for (int64_t b = begin; b < end; ++b) {
        const Best &best = b_.best[size_t(b)];
        if (best.count) total += best.total * std::exp(best.top - top);
      }
      broken |= !(total > 0.0f && total <= std::numeric_limits<float>::max());
    }
    for (int64_t k = 0; k < width_; ++k) {
      const int64_t at = broken ? -1 : next(begin, end);
      ids_[row * width_ + k] = at < 0 ? -1 : head_.ids[b_.places[size_t(at)]];
      if (chances_)
        chances_[row * width_ + k] = at < 0 ? 0.0f : std::exp(b_.values[size_t(at)] - top) / total;
      if (at >= 0) b_.places[size_t(at)] = -1;
    }
  }

  // Where the best of those that aren't taken is; -1: there is none.
  int64_t next(int64_t begin, int64_t end) const {
    int64_t taken = -1;
    for (int64_t b = begin; b < end; ++b)
      for (int64_t j = 0; j < b_.best[size_t(b)].count; ++j) {
        const int64_t at = b * width_ + j, place = b_.places[size_t(at)];
        if (place < 0) continue;
        const float value = b_.values[size_t(at)];
        const float most = taken < 0 ? value : b_.values[size_t(taken)];
        if (taken < 0 || value > most || (value == most && place < b_.places[size_t(taken)]))
          taken = at;
        break;  // a thread's own are in order
      }
    return taken;
  }

  const Thread &t_;
  const Head &head_;
  Ballots &b_;
  const int64_t known_, all_, width_;
  float *const chances_;
  int64_t *const ids_;
};

}  // namespace hasten
