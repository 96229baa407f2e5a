// Exit modules of kind `deep` at exit 0, as Python sees them, and what a request's run of one holds.
// Such a module drafts before the trunk runs: a row is its token's embedding, and a feature, which
// the target's states at some deep layers make at verified rows (that of the row before), and the
// module's own output at the parent at drafted ones. See hasten/exits/modules.py.
#pragma once

#include <vector>

#include "vote.h"

namespace hasten {

struct ExitModel {
  int64_t hidden, inner, heads, kv_heads, dim, deep;  // inner: 0 for no MLP; deep: layers
  int64_t half;       // embeddings, states, extra rows, keys and values: bfloat16, else floats
  float eps, unused;
  const void *table;  // embeddings (vocabulary, hidden)
  const float *frequencies;  // dim / 2
  const float *norm;         // (hidden), before the head; other norms are folded into the products
  // mixed: q, k, v and what a row adds to its feature, of embedding and feature side by side
  Linear fuse, mixed, out, gate_up, down;
};

// Takes the waiting rows, and some drafted ones.
struct ExitStep {
  int64_t drafted, want, width, threads;  // want: outputs of the last so many rows
  const int64_t *tokens;    // of the drafted rows
  const int32_t *parents;   // of them: drafted rows since the last root; -1 for the root
  const float *above;       // (drafted, hidden), their features; null: the outputs at their parents
  float *hidden;            // (want, hidden), before the last norm; or null
  const Head *head;         // or null
  float *chances;           // (want, width), largest first
  int64_t *ids;             // (want, width); -1 where logits aren't finite: the row says nothing
};

struct ExitRun {
  // What is kept from step to step.
  int64_t length = 0, drafted = 0;  // rows in the cache: verified, then drafted
  GrowingCache cache;
  std::vector<int64_t> waiting;    // tokens of verified rows that aren't in the cache
  std::vector<uint8_t> states;     // (held, deep, hidden): the row before them, then theirs
  int64_t held = 0;
  std::vector<int32_t> parents, depths;  // of the drafted rows
  std::vector<float> outputs;            // at the drafted rows

  // What a step works with.
  Barrier barrier;
  Buffer deep, both, narrow, wide;
  std::vector<float> rows, features, mixed, gathered, gate_up, normed, mask;
  Ballots ballots;
  std::vector<Scratch> scratch;
};

}  // namespace hasten
