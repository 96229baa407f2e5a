#!/usr/bin/env bash
# The embedded model's block drafter from its own text: states, learning, length head, on-policy
# rounds, the control of equal steps on the same text, held-out figures, speed.
#
#   scripts/train_dflash.sh OUT TEXT [TEXT ...]
#
# TEXT is what `hasten train data` has made, or a file of such rows. MINUTES (default 60) bounds it
# all: a fifth for the target's states, half for learning (a tenth of it the length head's), an
# eighth each for the rounds and for their control, the rest measures. A stopped run goes on with the same command.
#
# Set as you like: MODEL, DEVICE (default: cuda where there is one), DTYPE (bfloat16), SEED (0),
# INIT (first weights: target, random or a drafter's folder, to go on from it with other texts),
# SHARE (part of the texts to learn from; default: what a fifth of the time makes states of, at RATE
# tokens a second: 600 on a CPU, 20000 else), WRITER (batched; deployed answers with the drafter:
# the same text, slower here), CONTROL (1), SUITES (files for `hasten bench`; default: mini), and
# FLAGS (more options of `hasten train dflash`, such as "--layers 3").
#
# OUT gets sft/ and drafter/ (after the rounds), control/ (SFT's loss instead of reverse KL, same
# steps, same text), each with report.json and curve.json, and bench-NAME.json. OUT/states and the
# files training.pt may be deleted.
set -euo pipefail
out=${1:?usage: scripts/train_dflash.sh OUT TEXT [TEXT ...]}
shift
[ $# -gt 0 ] || { echo "usage: scripts/train_dflash.sh OUT TEXT [TEXT ...]" >&2; exit 2; }
minutes=${MINUTES:-60}
hasten=${HASTEN:-hasten}
device=${DEVICE:-$(python3 -c 'import torch; print("cuda" if torch.cuda.is_available() else "cpu")' 2>/dev/null || echo cpu)}
[ "$device" = cpu ] && rate=${RATE:-600} || rate=${RATE:-20000}
part() { awk -v m="$minutes" -v p="$1" 'BEGIN { printf "%.2f", m * p }'; }

# The share of the training texts whose states a fifth of the time can make.
share=${SHARE:-$(python3 - "$minutes" "$rate" "$@" <<'END'
import gzip, json, pathlib, sys
minutes, rate, *places = sys.argv[1:]
total = 0
for place in map(pathlib.Path, places):
    path = place / "rows.jsonl" if place.is_dir() else place
    with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
        total += sum(len(r["prompt"]) + len(r["output"]) for r in map(json.loads, file))
room = 0.2 * 60 * float(minutes) * float(rate)
print(f"{min(1.0, max(room / max(0.8 * total, 1), 0.001)):.3f}")
END
)}

data=()
for text in "$@"; do data+=(--data "$text"); done
usual=("${data[@]}" --share "$share" --seed "${SEED:-0}" --device "$device" --dtype "${DTYPE:-bfloat16}")
[ -n "${MODEL:-}" ] && usual+=(--model "$MODEL")
if [ "$device" != cpu ] || grep -qE 'avx512_bf16|amx_bf16' /proc/cpuinfo; then usual+=(--autocast); fi
read -ra more <<<"${FLAGS:-}"

mkdir -p "$out"
$hasten train dflash "${usual[@]}" --out "$out/sft" --work "$out/states" \
  --init "${INIT:-target}" --steps 1000000 --minutes "$(part 0.45)" --head-minutes "$(part 0.05)" "${more[@]}"
rounds=("${usual[@]}" --init "$out/sft" --steps 0 --head-blocks 0 --work "$out/states/rounds" \
  --rounds 1000 --writer "${WRITER:-batched}" "${more[@]}")
$hasten train dflash "${rounds[@]}" --out "$out/drafter" --round-minutes "$(part 0.125)"

steps=$(python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))["stages"]["rounds"]["step"])' \
  "$out/drafter/report.json")
if [ "${CONTROL:-1}" = 1 ] && [ "$steps" -gt 0 ]; then
  mkdir -p "$out/control/rounds"
  for text in "$out"/drafter/rounds/*.jsonl; do
    [ -e "$out/control/rounds/${text##*/}" ] || cp "$text" "$out/control/rounds/"
  done
  $hasten train dflash "${rounds[@]}" --out "$out/control" --objective sft \
    --round-steps "$steps" --round-minutes 100000
  python3 - "$out/sft" "$out/drafter" "$out/control" <<'END'
import json, sys
from statistics import pstdev
names = ("sft", "reverse KL", "sft, same steps")
print("tokens a pass on held-out text, and the spread between domains")
for name, folder in zip(names, sys.argv[1:]):
    stages = json.load(open(f"{folder}/report.json"))["stages"]
    found = list(stages.values())[-1]["held_out"]
    domains = {key: each["tau"] for key, each in found.items() if key != "all"}
    words = "  ".join(f"{key} {tau:.3f}" for key, tau in sorted(domains.items()))
    print(f"{name:16} all {found['all']['tau']:.3f}  spread {pstdev(domains.values()):.3f}  {words}")
END
fi

for suite in ${SUITES:-mini}; do
  name=$(basename "$suite")
  bench=(--device "$device" --dtype "${DTYPE:-bfloat16}" --suite "$suite" --limit 48 --max-new-tokens 64)
  [ -n "${MODEL:-}" ] && bench+=(--model "$MODEL")
  $hasten bench "${bench[@]}" --json "$out/bench-${name%.jsonl}.json" \
    --methods "ar,prompt-lookup,dflash,model=$out/drafter,dflash:adaflash,model=$out/drafter,dflash:cost,model=$out/drafter"
done
