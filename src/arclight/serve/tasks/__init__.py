"""Answer requests by task.

`detection` takes photos; `tensors` plain tensors for any program (Open Inference Protocol), which `batching` batches; `text` prompts and
chats (OpenAI's API), which `scheduler` generates together; `embeddings` texts to embed. `pool` divides the cores among requests to a program.
`app` calls the first ones for each request, and `models` makes the batchers, schedulers and pools.
"""
