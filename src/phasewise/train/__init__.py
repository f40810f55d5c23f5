"""Training of the small artefacts phasewise ships: corpus, tasks, tokenizer, dense model, trainer."""
