"""One decoder for many families, driven by a Hugging Face `config.json` and safetensors, or by a GGUF file."""
