"""Build vision-language models: an image encoder, a projector, and a language model's trunk.

Images come in as patches, which `siglip` encodes; `vision_llama` puts them in the places of tokens. Open `vision_llama` first.
"""
