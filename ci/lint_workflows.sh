#!/usr/bin/env bash
# zizmor (security) and actionlint (syntax, types, shell) on .github/workflows; neither needs the
# network. Both come with: bash ci/setup.sh --workflows
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [[ "${1:-}" == --help ]]; then
  sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
  exit 0
fi
zizmor --offline --no-progress .github/workflows
actionlint -color .github/workflows/*.yml
echo "zizmor and actionlint found nothing"
