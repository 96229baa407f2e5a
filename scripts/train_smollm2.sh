#!/usr/bin/env bash
# The embedded model's exit modules from nothing: training text, training, held-out figures, speed.
#
#   scripts/train_smollm2.sh OUT [MATH_PROMPTS.jsonl [CHAT_PROMPTS.jsonl]]
#
# MINUTES (default 15) bounds it all: two fifths make text, two fifths train, the rest measures.
# DEVICE (default: cuda where there is one) and EXITS (default 0=deep,2=deep) may be set. OUT gets
# data/ (the text), exits/ (the modules: a few MB) and bench.json; OUT/states may be deleted.
set -euo pipefail
out=${1:?usage: scripts/train_smollm2.sh OUT [MATH_PROMPTS [CHAT_PROMPTS]]}
minutes=${MINUTES:-15}
exits=${EXITS:-0=deep,2=deep}
hasten=${HASTEN:-hasten}
device=${DEVICE:-$(python3 -c 'import torch; print("cuda" if torch.cuda.is_available() else "cpu")' 2>/dev/null || echo cpu)}
share() { awk -v m="$minutes" -v p="$1" -v n="$2" 'BEGIN { printf "%.2f", m * p / n }'; }
modules=$(awk -F, '{ print NF }' <<<"$exits")

sources=(--source chat=self --source code --source summarisation --source translation)
[ -n "${2:-}" ] && sources+=(--source "math=$2")
[ -n "${3:-}" ] && sources+=(--source "chat=$3")
$hasten train data --out "$out/data" "${sources[@]}" --tokens 50000000 --device "$device" \
  --minutes "$(share 0.4 1)"
$hasten train exits --data "$out/data" --out "$out/exits" --exits "$exits" --device "$device" \
  --minutes "$(share 0.4 "$modules")" --work "$out/states"
$hasten bench --device "$device" --dtype bfloat16 --suite mini --max-new-tokens 64 \
  --methods "ar,prompt-lookup,early-exit,modules=$out/exits,exits=0,length=1,early-exit:tree,modules=$out/exits,early-exit:lookup,modules=$out/exits" \
  --json "$out/bench.json"
