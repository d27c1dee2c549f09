#!/usr/bin/env bash
# Writes .clangd with this checkout's include paths, so that clangd understands csrc/.
#
#   bash scripts/setup_clangd.sh
#
# The CUDA and CUTLASS headers are looked for where the build looks: in the environment of $PYTHON
# (.venv when it exists), FLASH_KDA_CUTLASS_DIR, and the submodule. What is missing is installed
# under build/clangd.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/lib.sh

require_writable build .clangd
if [[ -z "${PYTHON:-}" && -x .venv/bin/python ]]; then PYTHON=$PWD/.venv/bin/python; fi
python=$(require_python)
headers=$PWD/build/clangd
export PYTHONPATH=$headers${PYTHONPATH:+:$PYTHONPATH}
missing() {
  "$python" -c "from build_tools import clangd, cutlass, toolkit; print(*$1, sep='\n')"
}
fetch() {
  say "Installing headers under build/clangd: $(tr '\n' ' ' <build/clangd/wanted.txt)"
  "$python" -m pip install --quiet --upgrade --target "$headers" "$@" -r build/clangd/wanted.txt ||
    fail "could not install the headers"
}
mkdir -p "$headers"
missing "toolkit.missing_requirements(clangd.CUDA, {})" >build/clangd/wanted.txt
if grep -q . build/clangd/wanted.txt; then fetch; fi
missing "cutlass.missing_requirements()" >build/clangd/wanted.txt
if grep -q . build/clangd/wanted.txt; then fetch --no-deps; fi
"$python" -m build_tools.clangd
