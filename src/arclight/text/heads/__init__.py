"""Fine-tune a language model with a small head: classify texts, tag words, extract answers.

In: labelled rows and the weights of a pre-training run or a Hugging Face folder; out: metrics over all validation rows. `head_settings` are
the three tasks of recipes, `rows` reads files and makes batches, `head_module` trains and scores, `squad` has windows, spans and scores of
extracted answers. Open `head_module` first.
"""
