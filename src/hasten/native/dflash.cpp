// A block of a DFlash drafter, from the target's states to drafted ids, in one parallel region: what
// torch does in some four hundred operations, each of which starts cold after a pass of the target.

#include <new>

#include "dflash.h"

using namespace hasten;

namespace {

// One thread's part of a step. All sizes were made ready by `prepare_step`.
class Blockwise {
 public:
  Blockwise(const DFlashModel &m, const DFlashStep &s, DFlashRun &r)
      : m_(m), s_(s), r_(r), t_(r.barrier), slots_(s.anchor ? m.slots : 0), rows_(s.rows + slots_),
        kv_width_(m.kv_heads * m.dim), q_width_(m.heads * m.dim),
        row_(r.own.data() + t_.me * std::max(m.taps, int64_t(1)) * m.hidden) {}

  void run() {
    if (rows_) {
      turns();
      embed();
      fuse();
      for (int64_t l = 0; l < m_.layers; ++l) layer(m_.layer[l], l);
    }
    if (slots_) finish();
    if (s_.want) say();
  }

 private:
  // Cosines, then sines, of each row's angles; seen by the others after the next wait.
  void turns() {
    const Share share = t_.share(rows_);
    const int64_t half = m_.dim / 2;
    for (int64_t i = share.first; i < share.last; ++i)
      for (int64_t j = 0; j < half; ++j) {
        const float angle = float(s_.start + r_.length + i) * m_.frequencies[j];
        r_.turns[size_t(i * m_.dim + j)] = std::cos(angle) * m_.rope_scale;
        r_.turns[size_t(i * m_.dim + half + j)] = std::sin(angle) * m_.rope_scale;
      }
  }

  // What the slots are before the first layer.
  void embed() {
    const Share share = t_.share(slots_);
    for (int64_t i = share.first; i < share.last; ++i)
      widen(i ? m_.mask : s_.anchor, m_.half, 0, m_.hidden, r_.x.data() + i * m_.hidden);
  }

  // Rows of the context, as inputs of every layer's keys and values.
  void fuse() {
    if (!s_.rows) {
      t_.wait();
      return;
    }
    const int64_t n = m_.taps * m_.hidden;
    const Inputs in(r_.fused, m_.fuse.kind, n);
    const Share share = t_.share(s_.rows);
    for (int64_t i = share.first; i < share.last; ++i) {
      widen(s_.states, m_.half, i * n, n, row_);
      prepare(in, i, row_, 0, n, n);
    }
    t_.wait();
    t_.product(m_.fuse, in, s_.rows, r_.context.data(), false);
    normal(t_, r_.context.data(), m_.context_norm, m_.hidden, m_.eps, s_.rows, both(), row_, 0);
  }

  // Inputs of queries, keys and values: the context's rows, then the slots.
  Inputs both() const { return Inputs(r_.both, m_.layer->k.kind, m_.hidden); }

  void layer(const DFlashLayer &l, int64_t index) {
    const Inputs rows = both(), slots = inputs_from(rows, s_.rows);
    const Place place{m_.heads, m_.kv_heads, m_.dim, index};
    float *x = r_.x.data();
    if (slots_) normal(t_, x, l.input_norm, m_.hidden, m_.eps, slots_, slots, row_, 0);
    float *keys = r_.keys_values.data(), *queries = r_.queries.data();
    together({{&l.k, rows, rows_, keys, 2 * kv_width_},
              {&l.v, rows, rows_, keys + kv_width_, 2 * kv_width_},
              {&l.q, slots, slots_, queries, q_width_}});
    write(l, place);
    if (!slots_) return;

    t_.product(l.out, attention(l.out, place), slots_, x, true);
    const Inputs narrow(r_.narrow, l.gate.kind, m_.hidden), wide(r_.wide, l.down.kind, m_.inner);
    normal(t_, x, l.post_norm, m_.hidden, m_.eps, slots_, narrow, row_, 0);
    float *gate = r_.gate_up.data();
    together({{&l.gate, narrow, slots_, gate, 2 * m_.inner},
              {&l.up, narrow, slots_, gate + m_.inner, 2 * m_.inner}});
    gated(t_, gate, m_.inner, slots_, wide);
    t_.product(l.down, wide, slots_, x, true);
  }

  struct Product {
    const Linear *l;
    Inputs in;
    int64_t rows;
    float *out;
    int64_t lead;
  };

  // Products that don't depend on each other, shared out as if they were one.
  template <int N> void together(const Product (&all)[N]) {
    int64_t panels = 0, before = 0;
    for (const Product &p : all) panels += panels_of(p.l->out);
    const Share share = t_.share(panels);
    for (const Product &p : all) {
      const int64_t own = panels_of(p.l->out);
      const int64_t first = std::max(share.first - before, int64_t(0));
      const int64_t last = std::min(share.last - before, own);
      if (first < last && p.rows) multiply(*p.l, p.in, p.rows, first, last, p.out, p.lead, false);
      before += own;
    }
    t_.wait();
  }

  // Keys and values of all rows to the cache, and queries of the slots, normalised and turned.
  void write(const DFlashLayer &l, const Place &place) {
    const Share share = t_.share(rows_);
    for (int64_t i = share.first; i < share.last; ++i) {
      const float *turn = r_.turns.data() + i * m_.dim;
      float *keys = r_.keys_values.data() + i * 2 * kv_width_, *values = keys + kv_width_;
      for (int64_t h = 0; h < m_.kv_heads; ++h) {
        float *key = keys + h * m_.dim;
        normalize(key, l.k_norm, m_.dim, m_.eps, key);
        rotate(key, turn, 1.0f);
        r_.cache.put(place, stored(m_.half), h, r_.length + i, key, values + h * m_.dim);
      }
      if (i < s_.rows) continue;
      float *queries = r_.queries.data() + (i - s_.rows) * q_width_;
      for (int64_t h = 0; h < m_.heads; ++h) {
        float *query = queries + h * m_.dim;
        normalize(query, l.q_norm, m_.dim, m_.eps, query);
        rotate(query, turn, 1.0f / std::sqrt(float(m_.dim)));
      }
    }
    t_.wait();
  }

  // The halves of a head are pairs.
  void rotate(float *x, const float *turn, float scale) const {
    const int64_t half = m_.dim / 2;
    for (int64_t j = 0; j < half; ++j) {
      const float a = x[j], b = x[half + j], c = turn[j], s = turn[half + j];
      x[j] = (a * c - b * s) * scale;
      x[half + j] = (b * c + a * s) * scale;
    }
  }

  // What the slots gather, as inputs of `out`. Each sees the context and every slot, so all is as if
  // it were committed.
  Inputs attention(const Linear &out, const Place &place) {
    const Inputs in(r_.narrow, out.kind, q_width_);
    const int64_t seen = r_.length + rows_;
    const Part part{r_.cache.bytes.data(), r_.cache.capacity, seen};
    const Sequence all{&part, 1, seen, 0, slots_, nullptr, nullptr};
    const Gathering heads{r_.queries.data(), q_width_, r_.gathered.data(), in};
    int64_t item = 0;
    heads.gather(t_, all, place, stored(m_.half), r_.scratch[size_t(t_.me)], item);
    heads.finish(t_, place, slots_);
    return in;
  }

  // The slots' states under the last norm.
  void finish() {
    const Share share = t_.share(slots_);
    for (int64_t i = share.first; i < share.last; ++i) {
      float *to = r_.normed.data() + i * m_.hidden;
      normalize(r_.x.data() + i * m_.hidden, m_.norm, m_.hidden, m_.eps, to);
      if (!m_.half) {
        std::memcpy(static_cast<float *>(s_.hidden) + i * m_.hidden, to, size_t(m_.hidden) * 4);
        continue;
      }
      uint16_t *out = static_cast<uint16_t *>(s_.hidden) + i * m_.hidden;
      for (int64_t j = 0; j < m_.hidden; ++j) out[j] = to_bf16(to[j]);
    }
    t_.wait();
  }

  // The likeliest ids of slots 1 .. want, and their chances where they are asked for.
  void say() {
    const float *first = r_.normed.data() + m_.hidden;
    const Inputs in(r_.narrow, s_.head->product.kind, m_.hidden);
    const Share share = t_.share(s_.want);
    for (int64_t i = share.first; i < share.last; ++i)
      prepare(in, i, first + i * m_.hidden, 0, m_.hidden, m_.hidden);
    t_.wait();
    Vote vote(t_, *s_.head, r_.ballots, s_.width, s_.chances, s_.ids);
    vote.run(in, first, s_.want, m_.half);
  }

  const DFlashModel &m_;
  const DFlashStep &s_;
  DFlashRun &r_;
  const Thread t_;
  const int64_t slots_, rows_, kv_width_, q_width_;
  float *const row_;
};

// Memory for a step.
void prepare_step(const DFlashModel &m, const DFlashStep &s, DFlashRun &r) {
  const int64_t slots = s.anchor ? m.slots : 0, rows = s.rows + slots, h = m.hidden;
  r.fused.reserve(s.rows, m.taps * h);
  r.both.reserve(rows, h);
  r.narrow.reserve(m.slots, std::max(h, m.heads * m.dim));
  r.wide.reserve(slots, m.inner);
  room(r.own, s.threads * std::max(m.taps, int64_t(1)) * h);
  room(r.context, s.rows * h);
  room(r.x, slots * h);
  room(r.normed, m.slots * h);
  room(r.turns, rows * m.dim);
  room(r.queries, slots * m.heads * m.dim);
  room(r.keys_values, rows * 2 * m.kv_heads * m.dim);
  room(r.gathered, slots * m.heads * m.dim);
  room(r.gate_up, slots * 2 * m.inner);
  scratch_room(r.scratch, s.threads, r.length + rows, 0, m.dim);
  if (s.want) r.ballots.reserve(*s.head, s.want, s.threads, s.width);
  r.cache.grow(r.length + rows, m.layers * 2 * m.kv_heads, m.dim, stored(m.half));
}

}  // namespace

extern "C" {

// Sizes of the structs, so that Python can tell that it means the same ones.
int64_t hasten_dflash_sizes() {
  return int64_t(sizeof(DFlashLayer) | sizeof(DFlashModel) << 12 | sizeof(DFlashStep) << 24);
}

void *hasten_dflash_open() { return new (std::nothrow) DFlashRun; }
void hasten_dflash_close(void *run) { delete static_cast<DFlashRun *>(run); }

// Bytes of keys and values allocated.
int64_t hasten_dflash_bytes(const void *run) {
  return int64_t(static_cast<const DFlashRun *>(run)->cache.bytes.size());
}

// Runs a step; 0, or 1 when there is no memory for it (nothing has changed then).
int64_t hasten_dflash_step(const DFlashModel *model, void *run, const DFlashStep *step) {
  DFlashRun &r = *static_cast<DFlashRun *>(run);
  try {
    prepare_step(*model, *step, r);
  } catch (const std::bad_alloc &) {
    return 1;
  }
#pragma omp parallel num_threads(int(step->threads))
  Blockwise(*model, *step, r).run();
  r.length += step->rows;
  return 0;
}

}  // extern "C"
