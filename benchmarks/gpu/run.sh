#!/usr/bin/env bash
# Everything that needs a GPU: tests first, then measurements, within a limit of seconds.
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

step tests "$python" -m pytest -m cuda -q
for precision in float16 bfloat16 float32; do
  step "products-$precision" "$python" -m benchmarks.gpu.products --precision "$precision" \
    --out "$out/products-$precision.json"
done
step networks "$python" -m benchmarks.gpu.networks --effort quick --cache-dir "$out/cache" \
  --out "$out/networks.json"
step stock "$python" -m benchmarks.gpu.stock --effort quick --out "$out/stock.json"
exit "$failed"
