#!/usr/bin/env bash
# From sources to every kind of wheel and an index, on a Linux machine with Python and nothing else.
#
#   bash ci/build_all.sh [--out dist] [--pinned LOCAL]... [--smoke]
#
# Makes OUT/pypi (sdist and default wheels), OUT/wheels (those with a local version) and OUT/whl (an
# index of all of them) for both toolkits and both architectures. --pinned names the wheels that
# require one torch, such as cu129torch2.8, or all of them: "--pinned all" (default: cu129torch2.8
# and cu130torch2.11). --smoke also installs the default wheel into a clean environment.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/lib.sh

out=dist smoke='' pinned=()
while (($#)); do
  case $1 in
    --out) out=${2:?--out needs a folder} && shift ;;
    --pinned) pinned+=("${2:?--pinned needs a local version}") && shift ;;
    --smoke) smoke=1 ;;
    --help)
      sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
      exit 0
      ;;
    *) fail "unknown argument $1, see --help" ;;
  esac
  shift
done
((${#pinned[@]})) || pinned=(cu129torch2.8 cu130torch2.11)
[[ "${FLASH_KDA_CI_DRY_RUN:-}" == 1 ]] && exec echo "dry run: build ${pinned[*]} and all into $out"

SECONDS=0
base=$(require_python)
work=build/wheels
say "Tools in $work"
make_venv "$base" "$PWD/$work/venv"
PYTHON=$PWD/$work/venv/bin/python
export PYTHON
bash ci/setup.sh || fail "could not install requirements/wheels.txt: pip's message is above"
install_compilers "$PYTHON" "$PWD/build/compilers"
PYTHONPATH=$(compilers_path "$PWD/build/compilers")
export PYTHONPATH
# Same sources, same bytes.
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || echo 1767225600)}
export SOURCE_DATE_EPOCH
ci() { "$PYTHON" -m "ci.$1" "${@:2}"; }
matrix() { "$PYTHON" -c "from ci import matrix; m = matrix.load(); print(*($1), sep='\n')"; }

say "Parts"
ci matrix check
rm -rf "$work/parts" "$work/raw" "$work/repaired" "$out"/{pypi,wheels,whl}
for toolkit in $(matrix m.toolkits); do ci compile_cubins --toolkit "$toolkit" --parts "$work/parts"; done
for arch in $(matrix m.architectures); do ci link_launcher --arch "$arch" --parts "$work/parts"; done

say "Wheels"
ci sdist --out "$work/repaired"
for leg in $(matrix 'leg.name for leg in m.legs'); do
  ci assemble --leg "$leg" --sdist "$work"/repaired/*.tar.gz --parts "$work/parts" \
    --out "$work/raw/$leg"
  ci repair --leg "$leg" --wheel "$work/raw/$leg"/*.whl --out "$work/repaired"
done
selection=()
if [[ ${pinned[*]} != all ]]; then
  for local in "${pinned[@]}"; do selection+=(--local "$local"); done
fi
ci stage --from "$work/repaired" --out "$out" "${selection[@]}"

say "Index"
ci index --wheels "$out/pypi" --wheels "$out/wheels" --out "$out/whl" "${selection[@]}"

say "Launchers"
for wheel in "$out"/pypi/*.whl; do
  ci emulate --wheel "$wheel" || say "not opened here: $(basename "$wheel")"
done
if [[ -n $smoke ]]; then
  choose_torch "$PYTHON" ''
  ci smoke --wheel "$out/pypi"
fi
say "All of it took $SECONDS s:"
find "$out" -type f \( -name '*.whl' -o -name '*.tar.gz' \) -not -path '*/files/*' | sort
