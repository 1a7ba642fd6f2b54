"""Text on its way to a model: documents, tokenizer, corpora of token shards, batches."""
