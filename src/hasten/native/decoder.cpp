// A Llama-family decoder's pass over rows of any number of sequences, in one parallel region.
// Called through ctypes: plain C structs and pointers; see library.py for their Python side.

#include <new>

#include "selection.h"
#include "steps.h"

using namespace hasten;

namespace {

struct Layer {
  Linear qkv, out, gate_up, down;
  const float *attention_norm, *mlp_norm;
  const float *head_norm;  // (heads + kv_heads, dim), or null
};

struct Model {
  int64_t layers, hidden, inner, heads, kv_heads, dim;
  Stored stored;  // keys and values
  float eps, rope_scale;
  const Layer *layer;
  const float *frequencies;  // dim / 2
  const float *norm;
  Linear head;
};

struct Pass {
  int64_t rows, sequences, first, last, threads;
  float *hidden;             // (rows, hidden): in and out
  const int32_t *positions;  // of the rows
  const Sequence *sequence;  // their rows one after another
  const int32_t *taps;       // layers after which the hidden states are copied
  float *const *tapped;      // there, (rows, hidden) each
  int64_t tap_count;
  float *logits;             // (rows wanted, vocabulary), or null
  int64_t wanted;            // logits of the last so many rows
};

struct Workspace {
  Barrier barrier;
  Buffer narrow, wide;
  std::vector<float> qkv, mixed, gate_up, turns;
  std::vector<Scratch> scratch;
};

int64_t slots_of(const Sequence &s) {
  int64_t slots = 0;
  for (int64_t i = 0; i < s.count; ++i) slots += s.parts[i].slots;
  return slots;
}

void rotate(float *x, int64_t dim, const float *turn, float scale) {
  for (int64_t i = 0; i < dim; i += 2) {
    const float a = x[i], b = x[i + 1], c = turn[i], s = turn[i + 1];
    x[i] = (a * c - b * s) * scale;
    x[i + 1] = (a * s + b * c) * scale;
  }
}

// One thread's part of a pass.
class Worker {
 public:
  Worker(const Model &m, const Pass &p, Workspace &w)
      : m_(m), p_(p), w_(w), t_(w.barrier), rows_(p.rows),
        width_((m.heads + 2 * m.kv_heads) * m.dim), row_(m.hidden) {}

  void run() {
    turns();
    tap(p_.first);
    for (int64_t l = p_.first; l < p_.last; ++l) {
      const Layer &layer = m_.layer[l];
      t_.product(layer.qkv, take(layer.qkv, layer.attention_norm), rows_, w_.qkv.data(), false);
      write(layer, l);
      t_.product(layer.out, attention(layer.out, l), rows_, p_.hidden, true);
      t_.product(layer.gate_up, take(layer.gate_up, layer.mlp_norm), rows_, w_.gate_up.data(),
                 false);
      const Inputs in(w_.wide, layer.down.kind, m_.inner);
      gated(t_, w_.gate_up.data(), m_.inner, rows_, in);
      t_.product(layer.down, in, rows_, p_.hidden, true);
      tap(l + 1);
    }
    if (p_.logits)
      t_.product(m_.head, take(m_.head, m_.norm, rows_ - p_.wanted), p_.wanted, p_.logits, false);
  }

 private:
  // cos and sin of each row's angles; seen by the others after `take`'s barrier.
  void turns() {
    const Share share = t_.share(rows_);
    for (int64_t r = share.first; r < share.last; ++r)
      for (int64_t i = 0; i < m_.dim / 2; ++i) {
        const float angle = float(p_.positions[r]) * m_.frequencies[i];
        w_.turns[size_t(r * m_.dim + 2 * i)] = std::cos(angle) * m_.rope_scale;
        w_.turns[size_t(r * m_.dim + 2 * i + 1)] = std::sin(angle) * m_.rope_scale;
      }
  }

  // Hidden states from row `skipped` on, normalised, as inputs of `l`.
  Inputs take(const Linear &l, const float *norm, int64_t skipped = 0) {
    const Inputs in(w_.narrow, l.kind, m_.hidden);
    normal(t_, p_.hidden + skipped * m_.hidden, norm, m_.hidden, m_.eps, rows_ - skipped, in,
           row_.data(), 0);
    return in;
  }

  // Rotates queries and keys and writes keys and values to the cache.
  void write(const Layer &layer, int64_t l) {
    const Share share = t_.share(rows_);
    int64_t first = 0;
    for (int64_t i = 0; i < p_.sequences; ++i) {
      const Sequence &s = p_.sequence[i];
      const int64_t from = std::max(share.first, first), to = std::min(share.last, first + s.rows);
      for (int64_t r = from; r < to; ++r) write_row(layer, l, s, r - first, r);
      first += s.rows;
    }
    t_.wait();
  }

  void write_row(const Layer &layer, int64_t l, const Sequence &s, int64_t own, int64_t r) {
    float *qkv = w_.qkv.data() + r * width_;
    const float *turn = w_.turns.data() + r * m_.dim;
    const float scale = 1.0f / std::sqrt(float(m_.dim));
    for (int64_t h = 0; h < m_.heads + m_.kv_heads; ++h) {
      float *x = qkv + h * m_.dim;
      if (layer.head_norm) normalize(x, layer.head_norm + h * m_.dim, m_.dim, m_.eps, x);
      rotate(x, m_.dim, turn, h < m_.heads ? scale : 1.0f);
    }
    const Part &tail = s.parts[s.count - 1];
    const int64_t head = tail.capacity * slot_bytes(m_.stored, m_.dim);
    for (int64_t h = 0; h < m_.kv_heads; ++h) {
      uint8_t *keys = tail.base + (l * 2 * m_.kv_heads + h) * head;
      const float *k = qkv + (m_.heads + h) * m_.dim, *v = k + m_.kv_heads * m_.dim;
      write_slot(m_.stored, keys, keys + m_.kv_heads * head, m_.dim, s.slots[own], k, v);
    }
  }

  Inputs attention(const Linear &out, int64_t l) {
    const Inputs in(w_.narrow, out.kind, m_.heads * m_.dim);
    const Place place{m_.heads, m_.kv_heads, m_.dim, l};
    const Gathering heads{w_.qkv.data(), width_, w_.mixed.data(), in};
    int64_t first = 0, item = 0;
    for (int64_t i = 0; i < p_.sequences; first += p_.sequence[i++].rows)
      heads.from(first, place).gather(t_, p_.sequence[i], place, m_.stored,
                                      w_.scratch[size_t(t_.me)], item);
    heads.finish(t_, place, rows_);
    return in;
  }

  void tap(int64_t layer) {
    for (int64_t i = 0; i < p_.tap_count; ++i)
      if (p_.taps[i] == layer && t_.me == 0)
        std::memcpy(p_.tapped[i], p_.hidden, size_t(rows_ * m_.hidden) * 4);
    if (p_.tap_count) t_.wait();
  }

  const Model &m_;
  const Pass &p_;
  Workspace &w_;
  const Thread t_;
  const int64_t rows_, width_;
  std::vector<float> row_;
};

}  // namespace

extern "C" {

// Sizes of the structs, so that Python can tell that it means the same ones.
int64_t hasten_sizes() {
  return int64_t(sizeof(Linear) | sizeof(Layer) << 12 | sizeof(Model) << 24 | sizeof(Pass) << 36 |
                 sizeof(Sequence) << 48);
}

// Which instructions the products were built with: 1 AVX-512, 2 its bfloat16, 4 its int8 products.
int64_t hasten_features() {
  int64_t found = 0;
#if HASTEN_AVX512
  found |= 1;
#ifdef __AVX512BF16__
  found |= 2;
#endif
#ifdef __AVX512VNNI__
  found |= 4;
#endif
#endif
  return found;
}

int64_t hasten_weight_bytes(int32_t kind, int64_t out, int64_t in) {
  return panels_of(out) * panel_bytes(kind, in);
}

// A weight (out, in) of floats (F32) or bfloat16 (BF16), row by row, into panels.
void hasten_pack(int32_t kind, const void *weight, int64_t out, int64_t in, uint8_t *to) {
  const int64_t bytes = panel_bytes(kind, in);
#pragma omp parallel for
  for (int64_t panel = 0; panel < panels_of(out); ++panel) {
    std::memset(to + panel * bytes, 0, size_t(bytes));
    for (int64_t i = 0; i < 2 * LANES && panel * 2 * LANES + i < out; ++i) {
      const int64_t row = (panel * 2 * LANES + i) * in;
      uint8_t *place = to + panel * bytes + i / LANES * 64 + i % LANES * 4;
      for (int64_t k = 0; k < in; ++k)
        if (kind == F32)
          std::memcpy(place + k * 128, static_cast<const float *>(weight) + row + k, 4);
        else
          std::memcpy(place + k / 2 * 128 + k % 2 * 2,
                      static_cast<const uint16_t *>(weight) + row + k, 2);
    }
  }
}

// A weight d q + m of whole numbers q (out, padded in), d and m float16 (out, groups), into panels.
void hasten_pack_groups(int32_t kind, const uint8_t *q, const uint16_t *d, const uint16_t *m,
                        int64_t out, int64_t in, uint8_t *to) {
  const int64_t bytes = panel_bytes(kind, in), groups = padded(in) / GROUP, size = unit_bytes(kind);
#pragma omp parallel for
  for (int64_t panel = 0; panel < panels_of(out); ++panel) {
    std::memset(to + panel * bytes, 0, size_t(bytes));
    for (int64_t i = 0; i < 2 * LANES && panel * 2 * LANES + i < out; ++i) {
      const int64_t row = panel * 2 * LANES + i, lane = i % LANES;
      for (int64_t g = 0; g < groups; ++g) {
        uint8_t *place = to + panel * bytes + (2 * g + i / LANES) * size;
        const uint8_t *number = q + row * padded(in) + g * GROUP;
        for (int k = 0; k < GROUP; ++k) {
          uint8_t &byte = place[(kind == Q8 ? k : k % 16) / 4 * 64 + lane * 4 + k % 4];
          byte = uint8_t(byte | (kind == Q8 || k < 16 ? number[k] : number[k] << 4));
        }
        uint16_t *tail = reinterpret_cast<uint16_t *>(place + size - 64);
        tail[lane] = d[row * groups + g];
        tail[LANES + lane] = m[row * groups + g];
      }
    }
  }
}

// Rows of a packed weight as floats (count, in).
void hasten_rows(const Linear *l, const int64_t *rows, int64_t count, float *to) {
  const int64_t bytes = panel_bytes(l->kind, l->in), size = unit_bytes(l->kind);
  const int64_t steps = unit_steps(l->kind);
#pragma omp parallel for if (count > 64)
  for (int64_t i = 0; i < count; ++i) {
    const uint8_t *block = l->weight + rows[i] / (2 * LANES) * bytes + rows[i] / LANES % 2 * size;
    const int64_t lane = rows[i] % LANES;
    for (int64_t k = 0; k < l->in; ++k) {
      float &value = to[i * l->in + k];
      const uint8_t *unit = block + k / steps * 2 * size;
      if (l->kind == F32) {
        std::memcpy(&value, unit + lane * 4, 4);
      } else if (l->kind == BF16) {
        value = from_bf16(reinterpret_cast<const uint16_t *>(unit)[lane * 2 + k % 2]);
      } else {
        const int64_t j = k % GROUP;
        const uint8_t byte = unit[(l->kind == Q8 ? j : j % 16) / 4 * 64 + lane * 4 + j % 4];
        const int q = l->kind == Q8 ? byte : j < 16 ? byte & 15 : byte >> 4;
        const uint16_t *tail = reinterpret_cast<const uint16_t *>(unit + size - 64);
        value = load_f16(tail)[lane] * float(q) + load_f16(tail + LANES)[lane];
      }
    }
  }
}

// y (rows, out) = the product with x (rows, in), both floats.
void hasten_multiply(const Linear *l, const float *x, int64_t rows, float *y, int64_t threads) {
  Buffer buffer;
  buffer.reserve(rows, l->in);
  const Inputs in(buffer, l->kind, l->in);
  Barrier barrier;
#pragma omp parallel num_threads(int(threads))
  {
    const Thread t(barrier);
    const Share share = t.share(rows);
    for (int64_t r = share.first; r < share.last; ++r) prepare(in, r, x + r * l->in, 0, l->in, l->in);
    t.wait();
    t.product(*l, in, rows, y, false);
  }
}

void *hasten_open() { return new (std::nothrow) Workspace; }
void hasten_close(void *workspace) { delete static_cast<Workspace *>(workspace); }

// Runs a pass; 0, or 1 when there is no memory for it (nothing has been written then).
int64_t hasten_pass(const Model *model, void *workspace, const Pass *pass) {
  const Model &m = *model;
  Workspace &w = *static_cast<Workspace *>(workspace);
  try {
    const int64_t rows = pass->rows;
    w.narrow.reserve(rows, std::max(m.hidden, m.heads * m.dim));
    w.wide.reserve(rows, m.inner);
    room(w.qkv, rows * (m.heads + 2 * m.kv_heads) * m.dim);
    room(w.mixed, rows * m.heads * m.dim);
    room(w.gate_up, rows * 2 * m.inner);
    room(w.turns, rows * m.dim);
    scratch_room(w.scratch, pass->threads, 0, 0, m.dim);
    for (int64_t i = 0; i < pass->sequences; ++i)
      scratch_room(w.scratch, pass->threads, slots_of(pass->sequence[i]),
                   pass->sequence[i].pending, m.dim);
  } catch (const std::bad_alloc &) {
    return 1;
  }
#pragma omp parallel num_threads(int(pass->threads))
  Worker(m, *pass, w).run();
  return 0;
}

// The k largest of each row of logits (rows, n), see selection.h; 1 when a row holds NaN, else 0.
int64_t hasten_largest(const float *logits, int64_t rows, int64_t n, int64_t k, float *values,
                       int64_t *ids, int64_t threads) {
  int64_t broken = 0;
#pragma omp parallel for num_threads(int(threads)) if (rows > 1) reduction(| : broken)
  for (int64_t r = 0; r < rows; ++r)
    broken |= !largest(logits + r * n, n, k, values + r * k, ids + r * k);
  return broken;
}

// Moves slots of a block, all layers, one after another: `to[i]` gets what `from[i]` held.
void hasten_move(uint8_t *base, int64_t heads_of_all_layers, int64_t kv_heads, int64_t capacity,
                 int64_t dim, int64_t stored, const int32_t *from, const int32_t *to,
                 int64_t count) {
  with(Stored(stored), [&](auto kind) {
    using Own = Cache<decltype(kind)::value>;
    const int64_t bytes = Own::bytes(dim);
    for (int64_t h = 0; h < heads_of_all_layers; ++h) {
      uint8_t *place = base + h * capacity * bytes;
      const bool keys = h / kv_heads % 2 == 0;
      for (int64_t i = 0; i < count; ++i)
        if (keys)
          Own::move_key(place, dim, from[i], to[i]);
        else
          std::memcpy(place + to[i] * bytes, place + from[i] * bytes, size_t(bytes));
    }
  });
}

}  // extern "C"
