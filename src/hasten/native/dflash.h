// DFlash drafters as Python sees them, and what a request's run of one holds. Such a network drafts
// all slots of a block at once: they see each other, and the context, which is made from the target's
// own states. See hasten/dflash/net.py.
#pragma once

#include <vector>

#include "vote.h"

namespace hasten {

struct DFlashLayer {
  Linear q, k, v, out, gate, up, down;
  const float *input_norm, *post_norm;  // (hidden)
  const float *q_norm, *k_norm;         // (dim), the same for all heads
};

struct DFlashModel {
  int64_t layers, hidden, inner, heads, kv_heads, dim;
  int64_t taps, slots;  // layers of the target whose states come in; slots of a block
  int64_t half;         // states, embeddings, extra rows, keys, values: bfloat16, else floats
  float eps, rope_scale;
  const DFlashLayer *layer;            // all products of all layers are of one kind
  const float *frequencies;            // dim / 2
  const float *context_norm, *norm;    // (hidden), after `fuse` and after the last layer
  const void *mask;                    // (hidden), the embedding of all slots but the anchor's
  Linear fuse;
};

// Takes rows of the context, runs a block behind them, and says the `width` likeliest ids of slots. Each of
// the three may be left out; slots are those of the last block then.
struct DFlashStep {
  int64_t rows, want, width, threads;  // want: ids of slots 1 .. want
  int64_t start;                // the position of the context's first row
  const void *states;           // (rows, taps * hidden)
  const void *anchor;           // (hidden), the embedding of slot 0; null: no block
  void *hidden;                 // (slots, hidden), normalised
  const Head *head;
  float *chances;               // (want, width), or null
  int64_t *ids;                 // (want, width), -1 where a slot says nothing: see Vote
};

struct DFlashRun {
  // What is kept from step to step.
  int64_t length = 0;  // rows of the context in the cache
  GrowingCache cache;
  std::vector<float> normed;  // the last block's slots

  // What a step works with.
  Barrier barrier;
  Buffer fused, both, narrow, wide;
  std::vector<float> own, context, x, turns, queries, keys_values, gathered, gate_up;
  Ballots ballots;
  std::vector<Scratch> scratch;
};

}  // namespace hasten
