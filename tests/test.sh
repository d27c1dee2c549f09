#!/usr/bin/env bash
# Runs every check and test that this machine can run; arguments go to pytest.
#
#   bash tests/test.sh                 bash tests/test.sh --runslow
#   bash tests/test.sh tests/test_build.py -k cache
#
# Makes an environment of its own under build/, builds flash-kda for 90a and 100a (compiled kernels
# are kept in build/cubin-cache) and for the GPUs here, and installs it there.
# With FLASH_KDA_TEST_PYTHON=python3 nothing is set up, built or downloaded: that interpreter's
# installed flash-kda, torch and pytest are used, as on a GPU machine without network.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/lib.sh

if [[ -n "${FLASH_KDA_TEST_PYTHON:-}" ]]; then
  python=$FLASH_KDA_TEST_PYTHON
  command -v "$python" >/dev/null 2>&1 ||
    fail "FLASH_KDA_TEST_PYTHON is $python, which is not a program"
  reason=$("$python" -c 'import pytest, torch' 2>&1) ||
    fail "FLASH_KDA_TEST_PYTHON is $python, which needs pytest, torch and flash-kda installed" \
      "(${reason##*$'\n'})"
  exec "$python" -m pytest "$@"
fi

require_writable build
require_compiler
base=$(require_python)
environment=$PWD/build/test-venv
tools=$PWD/build/compilers
fla=$PWD/build/test-fla
make_venv "$base" "$environment"
python=$environment/bin/python
gpus=$("$python" -m build_tools.gpus || true)
choose_torch "$python" "$gpus"
install() { "$python" -m pip install --quiet --disable-pip-version-check "$@"; }

# Everything that pip brings is installed again only when what is asked for has changed.
wanted=$(cat requirements/*.txt | sha256sum)
if [[ "$(cat "$environment/wanted" 2>/dev/null)" != "$wanted" ]]; then
  say "Setting up $environment"
  install -r requirements/test.txt -r requirements/lint.txt -r requirements/docs.txt \
    -r requirements/wheels.txt -r requirements/workflows.txt 'torch>=2.4'
  needed=(-r requirements/fla.txt)
  "$python" -c 'import triton' 2>/dev/null || needed+=(-r requirements/triton.txt)
  rm -rf "$fla"
  install --no-deps --target "$fla" "${needed[@]}"
  echo "$wanted" >"$environment/wanted"
fi
install_compilers "$python" "$tools"
FLASH_KDA_TEST_TOOLS=$(compilers_path "$tools")
export FLASH_KDA_TEST_TOOLS
export FLASH_KDA_TEST_FLA=$fla

archs=90a,100a${gpus:+,$gpus}
say "Building and installing flash-kda for $archs"
FLASH_KDA_CUDA_ARCHS=$archs PYTHONPATH=$FLASH_KDA_TEST_TOOLS \
  install --no-build-isolation --no-deps .

say "Formats, lint and types"
export PATH=$environment/bin:$PATH
ruff check .
ruff format --check .
find csrc tests/slices -regex '.*\.\(cu\|cuh\|h\|hpp\|cpp\|inl\)' -print0 |
  xargs -0 clang-format --dry-run -Werror
mypy

say "Tests"
exec "$python" -m pytest "$@"
