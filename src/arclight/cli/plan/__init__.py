"""Plan a run on devices that need not be there: recipes of language models, and any other model as a pipeline."""
