#!/usr/bin/env bash
# Tests the hand-over from flash-linear-attention (FLA) with each release that can do it.
#
#   bash scripts/test_fla_versions.sh             bash scripts/test_fla_versions.sh 0.5.2 0.6.0
#
# Needs an environment with flash-kda, torch, Triton and pytest: $PYTHON, else python3. The releases
# are installed under build/fla/, where they change nothing in that environment. Without network,
# let pip find the wheels of flash-linear-attention, fla-core and einops in a folder:
# PIP_NO_INDEX=1 PIP_FIND_LINKS=wheels bash scripts/test_fla_versions.sh
# FLASH_KDA_TEST_DEVICE=cpu tests the hand-over without a GPU, and without FLA's own kernels.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/lib.sh

python=${PYTHON:-python3}
versions=("$@")
[[ $# -gt 0 ]] || versions=(0.5.0 0.5.1 0.5.2 0.6.0)
reason=$("$python" -c 'import flash_kda, pytest, torch, triton' 2>&1) ||
  fail "$python needs flash-kda, torch, Triton and pytest (${reason##*$'\n'}): set PYTHON to one that has them"
failed=()
for version in "${versions[@]}"; do
  say "flash-linear-attention $version"
  folder=$PWD/build/fla/$version
  if [[ ! -e $folder/complete ]]; then
    rm -rf "$folder"
    "$python" -m pip install --quiet --disable-pip-version-check --no-deps --target "$folder" \
      "flash-linear-attention==$version" "fla-core==$version" einops
    touch "$folder/complete"
  fi
  PYTHONPATH=$folder:$PWD/tests${PYTHONPATH:+:$PYTHONPATH} FLASH_KDA_REQUIRE_FLA=1 \
    "$python" -m pytest -p two_configurations tests/gpu/test_fla_backend.py || failed+=("$version")
done
[[ ${#failed[@]} -eq 0 ]] || fail "failed with flash-linear-attention ${failed[*]}"
