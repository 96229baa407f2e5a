// A step of an exit module, from waiting states to drafted ids, in one parallel region: what torch
// does in some twenty operations, each of which starts cold after a pass of the target.

#include <omp.h>

#include <algorithm>
#include <new>

#include "exits.h"
#include "selection.h"

using namespace hasten;

namespace {

// One thread's part of a step. All sizes were made ready by `prepare_step`.
class Stepper {
 public:
  Stepper(const ExitModel &m, const ExitStep &s, ExitRun &r)
      : m_(m), s_(s), r_(r), me_(omp_get_thread_num()), threads_(omp_get_num_threads()),
        waiting_(int64_t(r.waiting.size())), rows_(waiting_ + s.drafted), first_(r.drafted),
        root_(s.drafted && s.parents[0] < 0 && !s.above), before_(r.held - waiting_),
        qkv_((m.heads + 2 * m.kv_heads) * m.dim), width_(qkv_ + m.hidden),
        row_(r.rows.data() + me_ * std::max(m.deep, int64_t(2)) * m.hidden),
        hidden_(r.outputs.data() + first_ * m.hidden) {}

  void run() {
    fuse();
    product(m_.mixed, both(), rows_, r_.mixed.data(), false);
    write();
    if (!s_.want) return;
    product(m_.out, attention(), s_.want, hidden_, true);
    if (m_.inner) {
      product(m_.gate_up, normal(m_.gate_up, nullptr), s_.want, r_.gate_up.data(), false);
      product(m_.down, gate(), s_.want, hidden_, true);
    }
    if (s_.hidden && me_ == 0)
      std::memcpy(s_.hidden, hidden_, size_t(s_.want * m_.hidden) * 4);
    if (s_.head) say(*s_.head);
  }

 private:
  // This thread's share of n.
  struct Share {
    int64_t first, last;
    Share(int64_t n, const Stepper &s)
        : first(n * s.me_ / s.threads_), last(n * (s.me_ + 1) / s.threads_) {}
  };

  void wait() { r_.barrier.wait(threads_); }

  void product(const Linear &l, const Inputs &in, int64_t rows, float *out, bool add) {
    const Share share(panels_of(l.out), *this);
    multiply(l, in, rows, share.first, share.last, out, l.out, add);
    wait();
  }

  // Features of the waiting rows and of the root: each comes from the states of the row before.
  void fuse() {
    const int64_t skipped = before_ ? 0 : 1, count = waiting_ + root_ - skipped;
    if (count <= 0) return;
    const int64_t n = m_.deep * m_.hidden;
    const Inputs in(r_.deep, m_.fuse.kind, n);
    const Share share(count, *this);
    for (int64_t i = share.first; i < share.last; ++i) {
      for (int64_t d = 0; d < m_.deep; ++d) {
        float *part = row_ + d * m_.hidden;
        widen(r_.states.data(), m_.half, i * n + d * m_.hidden, m_.hidden, part);
        scale_rows(part, nullptr, m_.hidden, m_.eps, part);
      }
      prepare(in, i, row_, 0, n, n);
    }
    wait();
    product(m_.fuse, in, count, r_.features.data() + skipped * m_.hidden, false);
  }

  // Embeddings and features side by side, each normalised.
  Inputs both() {
    const Inputs in(r_.both, m_.mixed.kind, 2 * m_.hidden);
    const Share share(rows_, *this);
    for (int64_t i = share.first; i < share.last; ++i) {
      const int64_t token = i < waiting_ ? r_.waiting[size_t(i)] : s_.tokens[i - waiting_];
      float *feature = r_.features.data() + i * m_.hidden;
      if (i >= waiting_ + root_) {
        const int64_t own = i - waiting_;
        const float *above = s_.above ? s_.above + own * m_.hidden
                                      : r_.outputs.data() + s_.parents[own] * m_.hidden;
        std::memcpy(feature, above, size_t(m_.hidden) * 4);
      } else if (i == 0 && !before_) {  // nothing stands before a text's first row
        std::fill_n(feature, m_.hidden, 0.0f);
      }
      widen(m_.table, m_.half, token * m_.hidden, m_.hidden, row_);
      scale_rows(row_, nullptr, m_.hidden, m_.eps, row_);
      scale_rows(feature, nullptr, m_.hidden, m_.eps, row_ + m_.hidden);
      prepare(in, i, row_, 0, 2 * m_.hidden, 2 * m_.hidden);
    }
    wait();
    return in;
  }

  // Rotates queries and keys, stores keys and values; what wanted rows start from.
  void write() {
    const Share share(rows_, *this);
    for (int64_t i = share.first; i < share.last; ++i) {
      const int64_t own = i - waiting_;
      const int64_t depth = own < 0 ? own : r_.depths[size_t(first_ + own)];
      float *mixed = r_.mixed.data() + i * width_;
      rotate(mixed, float(r_.length + waiting_ + depth));
      const float *keys = mixed + m_.heads * m_.dim, *values = keys + m_.kv_heads * m_.dim;
      for (int64_t h = 0; h < m_.kv_heads; ++h) {
        const int64_t slot = r_.length + first_ + i;
        if (m_.half) put<true>(h, slot, keys + h * m_.dim, values + h * m_.dim);
        else put<false>(h, slot, keys + h * m_.dim, values + h * m_.dim);
      }
      const int64_t wanted = i - (rows_ - s_.want);
      if (wanted < 0) continue;
      const float *feature = r_.features.data() + i * m_.hidden, *skip = mixed + qkv_;
      for (int64_t j = 0; j < m_.hidden; ++j)
        hidden_[wanted * m_.hidden + j] = feature[j] + skip[j];
    }
    wait();
  }

  void rotate(float *x, float position) {
    for (int64_t i = 0; i < m_.dim; i += 2) {
      const float angle = position * m_.frequencies[i / 2], c = std::cos(angle), s = std::sin(angle);
      for (int64_t at = i; at < (m_.heads + m_.kv_heads) * m_.dim; at += m_.dim) {
        const float a = x[at], b = x[at + 1];
        x[at] = a * c - b * s;
        x[at + 1] = a * s + b * c;
      }
    }
  }

  template <bool HALF>
  void put(int64_t head, int64_t slot, const float *key, const float *value) {
    const int64_t bytes = r_.capacity * m_.dim * Cache<HALF>::BYTES;
    uint8_t *keys = r_.cache.data() + head * bytes;
    Cache<HALF>::put(keys, keys + m_.kv_heads * bytes, m_.dim, slot, key, value);
  }

  // What the wanted rows gather, as inputs of `out`. Drafted rows see all verified ones and their
  // own ancestors; verified ones are a chain.
  Inputs attention() {
    const Inputs in(r_.narrow, m_.out.kind, m_.heads * m_.dim);
    const int64_t pending = s_.drafted ? first_ + s_.drafted : s_.want;
    const int64_t seen = r_.length + waiting_ + (s_.drafted ? pending : 0);
    const Part part{r_.cache.data(), r_.capacity, seen};
    const Sequence all{&part,   1,       seen - pending,
                       pending, s_.want, nullptr, s_.drafted ? r_.mask.data() : nullptr};
    const int64_t group = m_.heads / m_.kv_heads, queries = s_.want * group;
    const int64_t each = queries * m_.kv_heads / (3 * threads_), size = each >= 3 ? 3 : 1;
    const int64_t tiles = (queries + size - 1) / size;
    for (int64_t item = me_; item < tiles * m_.kv_heads; item += threads_) {
      const int64_t from = item % tiles * size, to = std::min(queries, from + size);
      gather(all, item / tiles, from, to, in);
    }
    wait();
    if (m_.dim % GROUP == 0) return in;  // each head was made ready by itself
    const Share share(s_.want, *this);
    const int64_t n = m_.heads * m_.dim;
    for (int64_t i = share.first; i < share.last; ++i)
      prepare(in, i, r_.gathered.data() + i * n, 0, n, n);
    wait();
    return in;
  }

  void gather(const Sequence &s, int64_t kv_head, int64_t from, int64_t to, const Inputs &in) {
    const int64_t group = m_.heads / m_.kv_heads, skipped = rows_ - s_.want;
    const float *q[3];
    float *out[3];
    int64_t rows[3], heads[3];
    const int64_t n = to - from;
    for (int64_t i = 0; i < n; ++i) {
      rows[i] = (from + i) / group;
      heads[i] = kv_head * group + (from + i) % group;
      q[i] = r_.mixed.data() + (skipped + rows[i]) * width_ + heads[i] * m_.dim;
      out[i] = r_.gathered.data() + (rows[i] * m_.heads + heads[i]) * m_.dim;
    }
    if (m_.half) attend_some<true>(n, s, kv_head, q, rows, out);
    else attend_some<false>(n, s, kv_head, q, rows, out);
    if (m_.dim % GROUP == 0)
      for (int64_t i = 0; i < n; ++i)
        prepare(in, rows[i], out[i], heads[i] * m_.dim, (heads[i] + 1) * m_.dim,
                m_.heads * m_.dim);
  }

  template <bool HALF>
  void attend_some(int64_t n, const Sequence &s, int64_t kv_head, const float *const *q,
                   const int64_t *rows, float *const *out) {
    const Place place{m_.heads, m_.kv_heads, m_.dim, 0};
    Scratch &scratch = r_.scratch[size_t(me_)];
    if (n == 3) attend<HALF, 3>(s, place, kv_head, q, rows, out, scratch);
    else
      for (int64_t i = 0; i < n; ++i)
        attend<HALF, 1>(s, place, kv_head, q + i, rows + i, out + i, scratch);
  }

  // The wanted rows, normalised, as inputs of `l`; kept as floats too where they are weighted.
  Inputs normal(const Linear &l, const float *weight) {
    const Inputs in(r_.narrow, l.kind, m_.hidden);
    const Share share(s_.want, *this);
    for (int64_t i = share.first; i < share.last; ++i) {
      float *to = r_.normed.data() + i * m_.hidden;
      scale_rows(hidden_ + i * m_.hidden, weight, m_.hidden, m_.eps, to);
      prepare(in, i, to, 0, m_.hidden, m_.hidden);
    }
    wait();
    return in;
  }

  // silu(gate) * up, as inputs of `down`.
  Inputs gate() {
    const Inputs in(r_.wide, m_.down.kind, m_.inner);
    const int64_t groups = padded(m_.inner) / GROUP;
    const Share share(s_.want * groups, *this);
    for (int64_t i = share.first; i < share.last; ++i) {
      const int64_t row = i / groups, at = i % groups * GROUP;
      const size_t n = size_t(std::min<int64_t>(GROUP, m_.inner - at));
      const float *gate = r_.gate_up.data() + row * 2 * m_.inner + at;
      float value[GROUP], a[GROUP] = {}, b[GROUP] = {};
      std::memcpy(a, gate, n * 4);
      std::memcpy(b, gate + m_.inner, n * 4);
      for (int j = 0; j < GROUP; j += LANES) store(value + j, silu(load(a + j)) * load(b + j));
      prepare(in, row, value, at, at + int64_t(n), m_.inner);
    }
    wait();
    return in;
  }

  // The likeliest ids of the wanted rows. Each thread looks at the logits that it made.
  void say(const ExitHead &head) {
    const Inputs in = normal(head.product, m_.norm);
    const int64_t known = head.product.out, n = known + head.extras;
    const Share panels(panels_of(known), *this), extras(head.extras, *this);
    multiply(head.product, in, s_.want, panels.first, panels.last, r_.logits.data(), n, false);
    const int64_t bytes = m_.hidden * (m_.half ? 2 : 4);
    for (int64_t e = extras.first; e < extras.last; ++e) {
      const uint8_t *row = static_cast<const uint8_t *>(head.extra) + e * bytes;
      for (int64_t i = 0; i < s_.want; ++i)
        r_.logits[size_t(i * n + known + e)] =
            dot(r_.normed.data() + i * m_.hidden, row, m_.half, m_.hidden);
    }
    const int64_t first = std::min(known, panels.first * 2 * LANES);
    const int64_t last = std::min(known, panels.last * 2 * LANES);
    for (int64_t i = 0; i < s_.want; ++i) {
      look(i, 0, first, last);
      look(i, 1, known + extras.first, known + extras.last);
    }
    wait();
    const Share rows(s_.want, *this);
    for (int64_t i = rows.first; i < rows.last; ++i) choose(i, head);
  }

  // The best of logits first..last-1 of a row, in this thread's place for them.
  void look(int64_t row, int64_t part, int64_t first, int64_t last) {
    const int64_t at = (row * threads_ + me_) * 2 + part, n = last - first;
    Best &best = r_.best[size_t(at)];
    best = {-std::numeric_limits<float>::infinity(), 0.0f, std::min(n, s_.width), false};
    if (!n) return;
    const int64_t all_logits = s_.head->product.out + s_.head->extras;
    const float *x = r_.logits.data() + row * all_logits + first;
    float *values = r_.values.data() + at * s_.width;
    int64_t *places = r_.places.data() + at * s_.width;
    best.broken = !largest(x, n, best.count, values, places);
    if (best.broken) return;
    best.top = values[0];
    f32x16 total = {};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) total += exp(load(x + i) - all(best.top));
    best.total = sum(total);
    for (; i < n; ++i) best.total += std::exp(x[i] - best.top);
    for (int64_t j = 0; j < best.count; ++j) places[j] += first;
  }

  // The best of all threads' best, largest first, and the lowest place first among equals.
  void choose(int64_t row, const ExitHead &head) {
    const int64_t begin = row * threads_ * 2, end = begin + threads_ * 2;
    float top = -std::numeric_limits<float>::infinity(), total = 0.0f;
    bool broken = false;
    for (int64_t b = begin; b < end; ++b) {
      top = std::max(top, r_.best[size_t(b)].top);
      broken |= r_.best[size_t(b)].broken;
    }
    for (int64_t b = begin; b < end; ++b) {
      const Best &best = r_.best[size_t(b)];
      if (best.count) total += best.total * std::exp(best.top - top);
    }
    broken |= !(total > 0.0f && total <= std::numeric_limits<float>::max());
    float *chances = s_.chances + row * s_.width;
    int64_t *ids = s_.ids + row * s_.width;
    for (int64_t k = 0; k < s_.width; ++k) {
      int64_t taken = -1;
      float most = 0.0f;
      for (int64_t b = begin; b < end && !broken; ++b) {
        Best &best = r_.best[size_t(b)];
        for (int64_t j = 0; j < best.count; ++j) {
          const int64_t at = b * s_.width + j;
          if (r_.places[size_t(at)] < 0) continue;  // taken
          const float value = r_.values[size_t(at)];
          if (taken < 0 || value > most ||
              (value == most && r_.places[size_t(at)] < r_.places[size_t(taken)]))
            taken = at, most = value;
          break;  // a thread's own are in order
        }
      }
      ids[k] = taken < 0 ? -1 : head.ids[r_.places[size_t(taken)]];
      chances[k] = taken < 0 ? 0.0f : std::exp(most - top) / total;
      if (taken >= 0) r_.places[size_t(taken)] = -1;
    }
  }

  const ExitModel &m_;
  const ExitStep &s_;
  ExitRun &r_;
  const int64_t me_, threads_, waiting_, rows_, first_;
  const bool root_;       // the first drafted row's feature comes from the last verified row
  const int64_t before_;  // 1 where states of the row before the waiting ones are held
  const int64_t qkv_, width_;
  float *const row_;
  float *const hidden_;
};

// Memory for a step, and the places of its drafted rows in the tree.
void prepare_step(const ExitModel &m, const ExitStep &s, ExitRun &r) {
  const int64_t rows = int64_t(r.waiting.size()) + s.drafted, want = s.want;
  const int64_t total = r.drafted + s.drafted, h = m.hidden;
  r.deep.reserve(rows, m.deep * h);
  r.both.reserve(rows, 2 * h);
  r.narrow.reserve(want, std::max(h, m.heads * m.dim));
  r.wide.reserve(want, m.inner);
  room(r.rows, s.threads * std::max(m.deep, int64_t(2)) * h);
  room(r.features, rows * h);
  room(r.mixed, rows * m.mixed.out);
  room(r.gathered, want * m.heads * m.dim);
  room(r.gate_up, want * 2 * m.inner);
  room(r.normed, want * h);
  room(r.outputs, (r.drafted + want) * h);
  room(r.scratch, s.threads);
  if (s.head) {
    room(r.logits, want * (s.head->product.out + s.head->extras));
    room(r.best, want * s.threads * 2);
    room(r.values, want * s.threads * 2 * s.width);
    room(r.places, want * s.threads * 2 * s.width);
  }
  grow_cache(m, r, r.length + rows + r.drafted);
  room(r.parents, total);
  room(r.depths, total);
  room(r.mask, s.drafted * total);
  std::fill_n(r.mask.data(), s.drafted * total, -std::numeric_limits<float>::infinity());
  for (int64_t i = 0; i < s.drafted; ++i) {
    const int32_t parent = s.parents[i], own = int32_t(r.drafted + i);
    r.parents[size_t(own)] = parent;
    r.depths[size_t(own)] = parent < 0 ? 0 : r.depths[size_t(parent)] + 1;
    for (int32_t at = own; at >= 0; at = r.parents[size_t(at)]) r.mask[size_t(i * total + at)] = 0.0f;
  }
}

// What the next step starts from.
void settle(const ExitModel &m, const ExitStep &s, ExitRun &r) {
  r.length += int64_t(r.waiting.size());
  r.waiting.clear();
  r.drafted += s.drafted;
  const size_t bytes = size_t(m.deep * m.hidden * (m.half ? 2 : 4));
  if (r.held > 1) std::memcpy(r.states.data(), r.states.data() + size_t(r.held - 1) * bytes, bytes);
  r.held = std::min(r.held, int64_t(1));
}

}  // namespace

extern "C" {

// Sizes of the structs, so that Python can tell that it means the same ones.
int64_t hasten_exit_sizes() {
  return int64_t(sizeof(ExitModel) | sizeof(ExitHead) << 12 | sizeof(ExitStep) << 24);
}

void *hasten_exit_open() { return new (std::nothrow) ExitRun; }
void hasten_exit_close(void *run) { delete static_cast<ExitRun *>(run); }

// Verified rows wait: row i has tokens[i] and, of each deep layer's states, row kept[i]. Drafted
// rows are forgotten. 1 when there is no memory (nothing was changed), else 0.
int64_t hasten_exit_feed(const ExitModel *model, void *run, const int64_t *tokens,
                         const void *const *states, const int64_t *kept, int64_t count) {
  const ExitModel &m = *model;
  ExitRun &r = *static_cast<ExitRun *>(run);
  const size_t bytes = size_t(m.hidden * (m.half ? 2 : 4));
  try {
    room(r.states, (r.held + count) * m.deep * int64_t(bytes));
    r.waiting.insert(r.waiting.end(), tokens, tokens + count);
  } catch (const std::bad_alloc &) {
    return 1;
  }
  for (int64_t i = 0; i < count; ++i)
    for (int64_t d = 0; d < m.deep; ++d)
      std::memcpy(r.states.data() + size_t((r.held + i) * m.deep + d) * bytes,
                  static_cast<const uint8_t *>(states[d]) + size_t(kept[i]) * bytes, bytes);
  r.held += count;
  r.drafted = 0;
  return 0;
}

// Takes the waiting rows and runs a step; 0, or 1 when there is no memory for it.
int64_t hasten_exit_step(const ExitModel *model, void *run, const ExitStep *step) {
  ExitRun &r = *static_cast<ExitRun *>(run);
  if (step->drafted && step->parents[0] < 0) r.drafted = 0;
  try {
    prepare_step(*model, *step, r);
  } catch (const std::bad_alloc &) {
    return 1;
  }
#pragma omp parallel num_threads(int(step->threads))
  Stepper(*model, *step, r).run();
  settle(*model, *step, r);
  return 0;
}

}  // extern "C"
