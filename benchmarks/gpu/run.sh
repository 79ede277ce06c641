#!/usr/bin/env bash
# Everything that needs a GPU, most telling first, within a limit of seconds. On an H100 with 16 cores
# the tests took 42 s, the networks 170 s, the kernels 30 s, products of one precision 26 s.
#
#   bash benchmarks/gpu/run.sh OUT_FOLDER [SECONDS]
#
# Needs torch with CUDA, TVM's wheels and NVRTC (a CUDA build of torch brings it), no network. What
# is done already in OUT_FOLDER is not done again.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
out="${1:?usage: run.sh OUT_FOLDER [SECONDS]}"
end=$((SECONDS + ${2:-1500}))
python="${PYTHON:-python3}"
mkdir -p "$out"
failed=0

# step NAME COMMAND...: once, with what is left of the time; its output is in OUT_FOLDER/NAME.log.
step() {
  local name="$1" left=$((end - SECONDS))
  shift
  if [ -e "$out/$name.done" ]; then echo "$name: done before"; return; fi
  if [ "$left" -lt 30 ]; then echo "$name: no time left"; failed=1; return; fi
  echo "$name: at most $left s"
  if timeout "$left" "$@" > "$out/$name.log" 2>&1; then
    touch "$out/$name.done"
  else
    echo "$name: failed, see $out/$name.log"
    failed=1
  fi
  tail -n 25 "$out/$name.log"
}

step ready "$python" -m benchmarks.gpu.ready
[ -e "$out/ready.done" ] || exit 1  # everything below would be eager's
step tests "$python" -m pytest -m cuda -q --every -n 8 tests/gpu/test_gpu_kernels.py tests/gpu/test_gpu_triton.py tests/gpu/test_cuda.py
OMP_NUM_THREADS="${OMP_NUM_THREADS:-3}" step networks "$python" -m benchmarks.gpu.networks --together \
  --effort none --batch 1 --contestants eager,pruner,pruner-graphs,inductor-graphs --rounds 25 \
  --networks bert_base,gpt2,llama,vit,resnet50 --cache-dir "$out/cache" --out "$out/networks.json"
step decode "$python" -m benchmarks.gpu.decode --models llama --effort none \
  --cache-dir "$out/cache" --out "$out/decode.json"
step timeline "$python" -m benchmarks.gpu.timeline --cache-dir "$out/cache" --out "$out/timeline.json"
# What numbers do not show: reads past a buffer's end, and shared memory without a barrier between.
# NVIDIA's compute-sanitizer comes with the CUDA toolkit; where it is missing these steps fail.
checked=()
for name in softmax sums-down parts-of-a-row product split tensor-cores attention \
  attention,-heads-of-the-same-keys,-shared warpgroups,-a-cluster few-rows-of-bytes; do
  checked+=("tests/gpu/test_gpu_kernels.py::test_numbers_on_the_card[$name]")
done
for tool in memcheck racecheck; do
  step "sanitizer-$tool" "${SANITIZER:-compute-sanitizer}" --tool "$tool" --error-exitcode 9 \
    "$python" -m pytest -m cuda -q --every -p no:xdist "${checked[@]}"
done
step tasks "$python" -m benchmarks.gpu.kernels --networks bert_base --write-tasks "$out/tasks.json"
step kernels "$python" -m benchmarks.gpu.kernels --tasks "$out/tasks.json" --count 12 \
  --records "$out/records.jsonl" --out "$out/kernels.json"
for precision in float16 bfloat16 float32; do
  step "products-$precision" "$python" -m benchmarks.gpu.products --precision "$precision" \
    --count 8 --builders 14 --rounds 8 --out "$out/products-$precision.json"
done
step decode-larger "$python" -m benchmarks.gpu.decode --models tinyllama --effort none \
  --cache-dir "$out/cache" --out "$out/decode-larger.json"
step tuned "$python" -m benchmarks.gpu.networks --effort quick --cache-dir "$out/cache" \
  --out "$out/tuned.json"
step stock "$python" -m benchmarks.gpu.stock --effort quick --out "$out/stock.json"
exit "$failed"
