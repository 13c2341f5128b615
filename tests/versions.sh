#!/usr/bin/env bash
# The core of the suite on every PyTorch that setup.py allows and every Python from 3.10 on that is here; for the night.
#
#     tests/versions.sh [PYTHON ...]      e.g. tests/versions.sh python3.10 python3.13
#
# Each pair gets a fresh virtual environment. Prints one line for each, and exits with 1 if any failed.
set -uo pipefail
cd "$(dirname "$0")/.."

torches=(2.11 2.12 2.13 2.14)
core=(tests/unit tests/ranks/test_equivalence.py tests/ranks/test_offload.py tests/ranks/test_checkpoint.py
  tests/ranks/test_parallel_matrix.py tests/ranks/test_pipeline.py tests/ranks/test_activation_checkpointing.py)

pythons=("$@")
if [ $# = 0 ]; then
  for minor in 10 11 12 13 14; do
    command -v "python3.$minor" >/dev/null && pythons+=("python3.$minor")
  done
fi

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
failed=0
for python in "${pythons[@]}"; do
  for torch in "${torches[@]}"; do
    environment=$folder/$(basename "$python")-$torch log=$folder/log
    if ! { "$python" -m venv "$environment" && "$environment/bin/pip" install --quiet "torch==$torch.*" -e '.[test]'; } >"$log" 2>&1; then
      echo "$python, torch $torch: CANNOT BE INSTALLED: $(tail -n 1 "$log")"
      failed=1
    elif PATH=$environment/bin:$PATH "$environment/bin/python" -m pytest -q -n 3 "${core[@]}" >"$log" 2>&1; then
      echo "$python, torch $torch: $(tail -n 1 "$log")"
    else
      echo "$python, torch $torch: FAILED"
      grep -E '^(FAILED|ERROR|LEFT OVER)|^=' "$log" | tail -n 40
      failed=1
    fi
    rm -rf "$environment"
  done
done
exit $failed
