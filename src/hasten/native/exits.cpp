// A step of an exit module, from waiting states to drafted ids, in one parallel region: what torch
// does in some twenty operations, each of which starts cold after a pass of the target.

#include <new>

#include "exits.h"

using namespace hasten;

namespace {

// One thread's part of a step. All sizes were made ready by `prepare_step`.
class Stepper {
 public:
  Stepper(const ExitModel &m, const ExitStep &s, ExitRun &r)
      : m_(m), s_(s), r_(r), t_(r.barrier), place_{m.heads, m.kv_heads, m.dim, 0},
        waiting_(int64_t(r.waiting.size())), rows_(waiting_ + s.drafted), first_(r.drafted),
        root_(s.drafted && s.parents[0] < 0 && !s.above), before_(r.held - waiting_),
        qkv_((m.heads + 2 * m.kv_heads) * m.dim), width_(qkv_ + m.hidden),
        row_(r.rows.data() + t_.me * std::max(m.deep, int64_t(2)) * m.hidden),
        hidden_(r.outputs.data() + first_ * m.hidden) {}

  void run() {
    fuse();
    t_.product(m_.mixed, both(), rows_, r_.mixed.data(), false);
    write();
    if (!s_.want) return;
    t_.product(m_.out, attention(), s_.want, hidden_, true);
    if (m_.inner) {
      t_.product(m_.gate_up, normed(m_.gate_up, nullptr), s_.want, r_.gate_up.data(), false);
      const Inputs in(r_.wide, m_.down.kind, m_.inner);
      gated(t_, r_.gate_up.data(), m_.inner, s_.want, in);
      t_.product(m_.down, in, s_.want, hidden_, true);
    }
    if (s_.hidden && t_.me == 0)
      std::memcpy(s_.hidden, hidden_, size_t(s_.want * m_.hidden) * 4);
    if (!s_.head) return;
    const Inputs in = normed(s_.head->product, m_.norm);
    Vote(t_, *s_.head, r_.ballots, s_.width, s_.chances, s_.ids)
        .run(in, r_.normed.data(), s_.want, m_.half);
  }

 private:
  // Features of the waiting rows and of the root: each comes from the states of the row before.
  void fuse() {
    const int64_t skipped = before_ ? 0 : 1, count = waiting_ + root_ - skipped;
    if (count <= 0) return;
    const int64_t n = m_.deep * m_.hidden;
    const Inputs in(r_.deep, m_.fuse.kind, n);
    const Share share = t_.share(count);
    for (int64_t i = share.first; i < share.last; ++i) {
      for (int64_t d = 0; d < m_.deep; ++d) {
        float *part = row_ + d * m_.hidden;
        widen(r_.states.data(), m_.half, i * n + d * m_.hidden, m_.hidden, part);
        normalize(part, nullptr, m_.hidden, m_.eps, part);
      }
      prepare(in, i, row_, 0, n, n);
    }
    t_.wait();
    t_.product(m_.fuse, in, count, r_.features.data() + skipped * m_.hidden, false);
  }

  // Embeddings and features side by side, each normalised.
  Inputs both() {
    const Inputs in(r_.both, m_.mixed.kind, 2 * m_.hidden);
    const Share share = t_.share(rows_);
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
      normalize(row_, nullptr, m_.hidden, m_.eps, row_);
      normalize(feature, nullptr, m_.hidden, m_.eps, row_ + m_.hidden);
      prepare(in, i, row_, 0, 2 * m_.hidden, 2 * m_.hidden);
    }
    t_.wait();
    return in;
  }

  // Rotates queries and keys, stores keys and values; what wanted rows start from.
  void write() {
    const Share share = t_.share(rows_);
    for (int64_t i = share.first; i < share.last; ++i) {
      const int64_t own = i - waiting_;
      const int64_t depth = own < 0 ? own : r_.depths[size_t(first_ + own)];
      float *mixed = r_.mixed.data() + i * width_;
      rotate(mixed, float(r_.length + waiting_ + depth));
      const float *keys = mixed + m_.heads * m_.dim, *values = keys + m_.kv_heads * m_.dim;
      for (int64_t h = 0; h < m_.kv_heads; ++h) {
        const int64_t slot = r_.length + first_ + i;
        r_.cache.put(place_, stored(m_.half), h, slot, keys + h * m_.dim, values + h * m_.dim);
      }
      const int64_t wanted = i - (rows_ - s_.want);
      if (wanted < 0) continue;
      const float *feature = r_.features.data() + i * m_.hidden, *skip = mixed + qkv_;
      for (int64_t j = 0; j < m_.hidden; ++j)
        hidden_[wanted * m_.hidden + j] = feature[j] + skip[j];
    }
    t_.wait();
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

  // What the wanted rows gather, as inputs of `out`. Drafted rows see all verified ones and their
  // own ancestors; verified ones are a chain.
  Inputs attention() {
    const Inputs in(r_.narrow, m_.out.kind, m_.heads * m_.dim);
    const int64_t pending = s_.drafted ? first_ + s_.drafted : s_.want;
    const int64_t seen = r_.length + waiting_ + (s_.drafted ? pending : 0);
    const Part part{r_.cache.bytes.data(), r_.cache.capacity, seen};
    const Sequence all{&part,   1,       seen - pending,
                       pending, s_.want, nullptr, s_.drafted ? r_.mask.data() : nullptr};
    const float *queries = r_.mixed.data() + (rows_ - s_.want) * width_;
    const Gathering heads{queries, width_, r_.gathered.data(), in};
    int64_t item = 0;
    heads.gather(t_, all, place_, stored(m_.half), r_.scratch[size_t(t_.me)], item);
    heads.finish(t_, place_, s_.want);
    return in;
  }

  // The wanted rows, normalised, as inputs of `l`.
  Inputs normed(const Linear &l, const float *weight) {
    const Inputs in(r_.narrow, l.kind, m_.hidden);
    normal(t_, hidden_, weight, m_.hidden, m_.eps, s_.want, in, r_.normed.data(), m_.hidden);
    return in;
  }

  const ExitModel &m_;
  const ExitStep &s_;
  ExitRun &r_;
  const Thread t_;
  const Place place_;
  const int64_t waiting_, rows_, first_;
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
  const int64_t slots = r.length + rows + r.drafted;
  scratch_room(r.scratch, s.threads, slots, std::max(total, want), m.dim);
  if (s.head) r.ballots.reserve(*s.head, want, s.threads, s.width);
  r.cache.grow(slots, 2 * m.kv_heads, m.dim, stored(m.half));
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
  return int64_t(sizeof(ExitModel) | sizeof(Head) << 12 | sizeof(ExitStep) << 24);
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
