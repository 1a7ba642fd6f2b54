"""Answer requests by task.

`detection` takes photos, `tensors` plain tensors of any program (Open Inference Protocol), which `batching` computes together, `text`
prompts and chats (OpenAI's API), whose texts `scheduler` generates together, `embeddings` texts whose vectors are wanted.
"""
