#!/usr/bin/env bash
# Everything that takes a GPU, on a machine that may have no network: tests, benchmarks, profile, sanitizer.
#
#     tests/gpu/run.sh [--files FOLDER] [--results FOLDER] [PART ...]      e.g. tests/gpu/run.sh --files wheels tests nccl
#
# Each PART takes under 9 minutes; by default all are run, one after the other:
#     tests      tests/gpu; ranks that share the GPU exchange over gloo
#     nccl       the same over NCCL (2.30 or newer), which serves ranks that share a GPU
#     ranks      tests/ranks, whose ranks share the GPU over gloo
#     clients    transformers' Trainer by its DeepSpeed route, and zerorun-report
#     sanitizer  late copies and offload under torch's sanitizer of streams
#     benchmark  tests/perf/gpu.py: bandwidths, the optimizer, a model of 1B at every stage, beside peers, and offload
#     large      tests/perf/gpu.py: a model of 7B, and the largest that fits
#     profile    tests/perf/gpu_profile.py
#
# --files: wheels of what this Python lacks, and a libnccl.so.2 (or .xz) to take instead of torch's. --results: where
# gpu_PART.json and logs go, by default tests/perf/results. Exits with 1 if a part failed; the others run all the same.
set -uo pipefail
cd "$(dirname "$0")/../.."

files="" results=tests/perf/results
while [[ ${1-} == --* ]]; do
  case $1 in
    --files) files=$2 ;;
    --results) results=$2 ;;
    *) echo "unknown option $1" >&2 && exit 2 ;;
  esac
  shift 2
done
parts=("${@:-tests nccl ranks clients sanitizer benchmark large profile}")
python=${PYTHON:-python3}
mkdir -p "$results"

install() {
  (cd / && "$python" -c 'import zerorun.ops') 2>/dev/null && return
  local wheels=()
  [ -n "$files" ] && wheels=("$files"/*.whl)
  if [ -n "$files" ] && [ -e "${wheels[0]}" ]; then
    "$python" -m pip install -q --no-index --no-deps "${wheels[@]}" || return
    "$python" -m pip install -q --no-index --no-deps --no-build-isolation -e . || return
  else
    "$python" -m pip install -q -e '.[test]'
  fi
}

own_nccl() {
  [ -z "$files" ] && return
  [ -e "$files/libnccl.so.2.xz" ] && xz -dkf "$files/libnccl.so.2.xz"
  [ -e "$files/libnccl.so.2" ] && export LD_PRELOAD=$PWD/$files/libnccl.so.2
}

run_tests() { "$python" -m pytest -q -n 6 tests/gpu --junitxml "$results/gpu_tests.xml"; }

run_nccl() (
  own_nccl
  export NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_MAX_CTAS=${NCCL_MAX_CTAS:-4} NCCL_NET_GDR_LEVEL=LOC
  "$python" -m pytest -q -n 3 tests/gpu -k "every_stage or it_equals" --junitxml "$results/gpu_nccl.xml"
)

run_ranks() (
  export ZERORUN_TEST_DEVICE=cuda:0
  local left_out=()
  while read -r name; do
    [[ $name == tests/* ]] && left_out+=(--deselect "$name")
  done <tests/gpu/not_on_a_gpu.txt
  "$python" -m pytest -q -n "${RANK_WORKERS:-12}" tests/ranks "${left_out[@]}" --junitxml "$results/gpu_ranks.xml"
)

run_clients() {
  local launch=("$python" -m zerorun.launcher.cli --as-deepspeed --nproc-per-node 1)
  "${launch[@]}" tests/clients/trainer_job.py "$results/gpu_trainer.json" plain accumulation checkpointing lora \
    generate resume best save bf16 fp16 "optimizer in the file" "offloaded optimizer" "offloaded parameters" && "$python" bin/zerorun-report
}

run_sanitizer() (
  export TORCH_CUDA_SANITIZER=1
  "$python" -m pytest -q -n 6 tests/gpu -k "late_copies or every_stage" --junitxml "$results/gpu_sanitizer.xml"
)

run_benchmark() {
  "$python" tests/perf/gpu.py --parts optimizer runtime memory offload --json "$results/gpu_benchmark.json"
}

run_large() { "$python" tests/perf/gpu.py --parts 7B largest --peers fsdp2 --json "$results/gpu_large.json"; }

run_profile() {
  "$python" tests/perf/gpu_profile.py --names bare zerorun-0 zerorun-1 zerorun-3 fsdp2 --json "$results/gpu_profile.json"
}

install || { echo "cannot install: give --files a folder with the wheels that are missing" >&2; exit 1; }
failed=()
# shellcheck disable=SC2068
for part in ${parts[@]}; do
  begun=$SECONDS
  "run_$part" > >(tee "$results/gpu_$part.log") 2>&1 || failed+=("$part")
  echo "== $part: $((SECONDS - begun)) s"
done
[ ${#failed[@]} = 0 ] || { echo "FAILED: ${failed[*]}"; exit 1; }
