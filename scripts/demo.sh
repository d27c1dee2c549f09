#!/usr/bin/env bash
# From a fresh clone to running kernels: makes .venv, builds for the GPUs here (else for 90a),
# installs, and runs flash_kda's doctor and demo. Safe to run again.
#
#   bash scripts/demo.sh
#
# Honours PYTHON, CXX, PIP_CONSTRAINT, FLASH_KDA_CUDA_ARCHS, FLASH_KDA_CUDA, FLASH_KDA_CUTLASS_DIR.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/lib.sh

[[ "$(uname -s)" == Linux ]] || fail "flash-kda runs on Linux only"
if [[ -n "${FLASH_KDA_CUDA_ARCHS+set}" && -z "${FLASH_KDA_CUDA_ARCHS//[[:space:],]/}" ]]; then
  fail "FLASH_KDA_CUDA_ARCHS is empty: name targets such as 90a,100a, or unset it"
fi
require_writable .venv build
require_compiler
base=$(require_python)
make_venv "$base" .venv
python=$PWD/.venv/bin/python

gpus=$("$python" -m build_tools.gpus || true)
if [[ -n "${FLASH_KDA_CUDA_ARCHS:-}" ]]; then
  say "Targets: $FLASH_KDA_CUDA_ARCHS (FLASH_KDA_CUDA_ARCHS)"
elif [[ -n "$gpus" ]]; then
  export FLASH_KDA_CUDA_ARCHS=$gpus
  say "Targets: $gpus (the GPUs of this machine)"
else
  export FLASH_KDA_CUDA_ARCHS=90a
  say "No supported GPU here: building for 90a; the demo will use the CPU path"
fi
choose_torch "$python" "$gpus"

log=build/demo-install.log
mkdir -p build
say "Building and installing flash-kda (first time: a few minutes; log: $log)"
# numpy only keeps torch from warning that it is not there.
if ! "$python" -m pip install . numpy >"$log" 2>&1; then
  reason=$(grep -m 1 -o 'flash-kda: .*' "$log" || true)
  if [[ -z "$reason" ]]; then
    tail -n 25 "$log" >&2
    reason="see above, and $log"
  fi
  fail "the installation failed: ${reason#flash-kda: }"
fi
grep -o 'Successfully installed.*' "$log" || true

say "python -m flash_kda doctor"
"$python" -m flash_kda doctor || fail "doctor found a problem, described above"

say "python -m flash_kda demo"
"$python" -m flash_kda demo
say "Done. Use it with: source .venv/bin/activate"
