#!/usr/bin/env bash
# Makes what `python scripts/peers.py --tools DIR all --few-bits ...` measures, in the folder ROOT that setup_peers.sh has
# set up:   peers_few_bits.sh ROOT DIR SMOLLM2.gguf GEMMA3.gguf
#
# S and M in Q4_0 with a head in Q8_0, M with its head in Q4_0 too, and L, a Llama of 1.2 B whose matrices have multiples
# of 256 inputs, in Q4_K_M: all by llama.cpp's own llama-quantize. M once more in int4 by groups of 128, by phasewise. S, M and L in int4 for OpenVINO GenAI (groups of 128,
# symmetric) and for ONNX Runtime GenAI (blocks of 32, its default). llama.cpp is built once more without its kernels for
# AMX, which stop with an illegal instruction on some virtual machines; those for AVX-512 repack weights too.
set -eu
root=$(realpath "$1") tools=$(realpath "$2") smollm2=$(realpath "$3") gemma3=$(realpath "$4")
here=$(cd "$(dirname "$0")" && pwd)
cd "$root"
[ -x llama.cpp/build/bin/llama-quantize ] || cmake --build llama.cpp/build -j2 --target llama-quantize > /dev/null
[ -x llama.cpp/build512/bin/llama-batched-bench ] || {
  cmake -S llama.cpp -B llama.cpp/build512 -DCMAKE_BUILD_TYPE=Release -DLLAMA_CURL=OFF -DGGML_NATIVE=OFF \
    $(printf -- '-DGGML_%s=ON ' SSE42 AVX AVX2 FMA F16C BMI2 AVX512 AVX512_VBMI AVX512_VNNI AVX512_BF16) > /dev/null
  cmake --build llama.cpp/build512 -j2 --target llama-batched-bench > /dev/null; }
mkdir -p llama-avx512 && ln -sfn ../llama.cpp/build512 llama-avx512/build
[ -d ckpt/L ] || PYTHONPATH="$tools" base/bin/python "$here/peers_large.py" ckpt
quantise() { LD_LIBRARY_PATH=llama.cpp/build/bin llama.cpp/build/bin/llama-quantize "$@" > /dev/null; }
for size in S M L; do
  [ -f gguf/$size-bf16.gguf ] || base/bin/python "$tools/bench_peers.py" gguf --model ckpt/$size --llama llama.cpp --gguf gguf/$size-bf16.gguf --dtype bf16
done
for size in S M; do
  [ -f gguf/$size-q4_0.gguf ] || quantise --token-embedding-type q8_0 --output-tensor-type q8_0 gguf/$size-bf16.gguf gguf/$size-q4_0.gguf q4_0
done
[ -f gguf/M-q4_0-all.gguf ] || quantise --pure gguf/M-bf16.gguf gguf/M-q4_0-all.gguf q4_0
[ -f gguf/L-q4_k_m.gguf ] || quantise gguf/L-bf16.gguf gguf/L-q4_k_m.gguf q4_k_m
[ -d ckpt/M-int4-g128 ] || phasewise convert weights ckpt/M ckpt/M-int4-g128 --weights int4:group=128 --windows 0
ln -sf "$smollm2" gguf/smollm2.gguf && ln -sf "$gemma3" gguf/gemma3.gguf
[ -d ort ] || { python3 -m venv ort && ort/bin/pip install -q torch==2.13.0 onnxruntime-genai==0.18.0 onnx onnx-ir transformers==5.5.4; }
for size in S M L; do
  [ -d ov_ckpt/$size-int4 ] || ovexp/bin/optimum-cli export openvino --model ckpt/$size --task text-generation-with-past --weight-format int4 --group-size 128 --sym ov_ckpt/$size-int4
  [ -d ort_ckpt/$size-int4 ] || ort/bin/python -m onnxruntime_genai.models.builder -i ckpt/$size -o ort_ckpt/$size-int4 -p int4 -e cpu
done
