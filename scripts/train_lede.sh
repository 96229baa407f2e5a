#!/usr/bin/env bash
# LEDE's agent from nothing: experience, agents of three seeds, agents that never saw a domain,
# ablations, and what all of them come to on documents that none has seen (by the cost table).
#
#   scripts/train_lede.sh OUT TEXT [TEXT ...]
#
# TEXT is what `hasten train data` has made, or a file of such rows; domains that lack documents get
# new answers. Set as you like: EXITS (2+4+8), MODULES (a folder; default: those shipped), DOCS (40
# a domain), ROLLOUTS (200), SEEDS ("0 1 2"), UPDATES (2500 at each of 3 prices), COLLECT_MINUTES
# (40), MATH and CHAT (files of prompts), DTYPE (bfloat16), COSTS (a cost table; default: measured
# at the start, when the machine should have nothing else to do).
#
# OUT gets experience/, costs.json, agents/NAME/, replay.json and replay-DOMAIN.json; OUT/agent.npz is
# the seed that earns most where agents are selected. On two idle cores: collecting takes
# COLLECT_MINUTES at most, an agent about two minutes, replay three.
set -euo pipefail
out=${1:?usage: scripts/train_lede.sh OUT TEXT [TEXT ...]}
shift
[ $# -gt 0 ] || { echo "usage: scripts/train_lede.sh OUT TEXT [TEXT ...]" >&2; exit 2; }
hasten=${HASTEN:-hasten}
exits=${EXITS:-2+4+8}
seeds=${SEEDS:-0 1 2}
dtype=${DTYPE:-bfloat16}
modules=(--exits "$exits")
[ -n "${MODULES:-}" ] && modules+=(--modules "$MODULES")
mkdir -p "$out/agents"

costs=${COSTS:-$out/costs.json}
[ -f "$costs" ] || $hasten train lede costs "${modules[@]}" --dtype "$dtype" -o "$costs"

data=()
for text in "$@"; do data+=(--data "$text"); done
sources=(--source chat=self --source code --source summarisation --source translation)
[ -n "${MATH:-}" ] && sources+=(--source "math=$MATH")
[ -n "${CHAT:-}" ] && sources+=(--source "chat=$CHAT")
$hasten train lede collect "${data[@]}" "${sources[@]}" "${modules[@]}" --dtype "$dtype" \
  --docs "${DOCS:-40}" --rollouts "${ROLLOUTS:-200}" --minutes "${COLLECT_MINUTES:-40}" \
  -o "$out/experience"

# fit NAME [options]: an agent, unless it is there
fit() {
  local name=$1
  shift
  [ -f "$out/agents/$name/agent.npz" ] || $hasten train lede fit -e "$out/experience" --costs "$costs" \
    --updates "${UPDATES:-2500}" -o "$out/agents/$name" "$@"
}
selected() { python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))["selected_rho"])' \
  "$out/agents/$1/fit.json"; }
best_of() { for name in "$@"; do echo "$(selected "$name") $name"; done | sort -g | tail -1 | cut -d' ' -f2; }

# The longest draft is a setting like any other (the row after it costs no probe).
for steps in 2 4 12; do fit "steps$steps" --steps "$steps"; done
steps=$(best_of steps2 steps4 steps12)
steps=${steps#steps}
names=()
for seed in $seeds; do
  fit "seed$seed" --steps "$steps" --seed "$seed"
  names+=("seed$seed")
done
cp "$out/agents/$(best_of "${names[@]}")/agent.npz" "$out/agent.npz"

fixed=$(python3 -c 'import json, sys; print(*json.load(open(sys.argv[1]))["best_fixed"])' \
  "$out/agents/seed${seeds%% *}/fit.json")
fit minimal --steps "$steps" --state minimal
fit match --steps "$steps" --reward match
fit ratio --steps "$steps" --reward ratio
fit one-exit --steps "$steps" --exits "${fixed% *}"
length=${fixed#* }
[ "$length" -gt 0 ] || length=1
fit one-length --steps 12 --length "$length"
names+=(minimal match ratio one-exit one-length)

agents=()
for name in "${names[@]}"; do agents+=(--agent "$name=$out/agents/$name/agent.npz"); done
$hasten train lede replay -e "$out/experience" --costs "$costs" "${agents[@]}" --json "$out/replay.json"

# Leave one domain out: an agent that never saw it, beside those that did.
domains=$(python3 -c 'import json, sys; print(*sorted({json.loads(x)["domain"] for x in open(sys.argv[1])}))' \
  "$out/experience/docs.jsonl")
for domain in $domains; do
  fit "without-$domain" --steps "$steps" --leave-out "$domain"
  fit "only-$domain" --steps "$steps" --domains "$domain"
  $hasten train lede replay -e "$out/experience" --costs "$costs" --leave-out "$domain" --no-rules \
    --agent "all=$out/agents/seed${seeds%% *}/agent.npz" \
    --agent "without=$out/agents/without-$domain/agent.npz" \
    --agent "own=$out/agents/only-$domain/agent.npz" --json "$out/replay-$domain.json"
done
python3 - "$out" $domains <<'END'
import json, sys
out, *domains = sys.argv[1:]
print("domain          fixed elsewhere    all  without    own  kept of the gain")
for name in domains:
    rows = json.load(open(f"{out}/replay-{name}.json"))["rows"]
    rho = {row["policy"]: row["rho"] for row in rows}
    fixed = rows[0]["rho"]
    kept = (rho["without"] - fixed) / (rho["all"] - fixed) if rho["all"] > fixed else float("nan")
    print(f"{name:15} {fixed:15.3f} {rho['all']:6.3f} {rho['without']:8.3f} {rho['own']:6.3f} {kept:17.2f}")
END
