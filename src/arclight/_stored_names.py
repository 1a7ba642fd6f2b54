"""Map class names in files of earlier versions to the present ones.

Checkpoints, programs and recipes name classes as ``package.module:Class``. A module that moves, or a class that is renamed, is entered
here, so that those files stay readable: entries stay. `recipe`, ``trainer.hparams`` and ``deploy.programs.processing`` call `current` on
each name that they read.
"""

from __future__ import annotations

_CALLBACKS, _TEXT = "arclight.trainer.callbacks", "arclight.text"

MOVED = {
    "arclight.deploy.processing": "arclight.deploy.programs.processing",
    f"{_TEXT}.data_module": f"{_TEXT}.data.data_module",
    f"{_TEXT}.data_settings": f"{_TEXT}.data.data_settings",
    f"{_TEXT}.models.attention": f"{_TEXT}.model.attention",
    f"{_TEXT}.models.decoder": f"{_TEXT}.model.decoder",
    f"{_TEXT}.models.deepseek": f"{_TEXT}.families.deepseek",
    f"{_TEXT}.models.flux": f"{_TEXT}.diffusion.flux",
    f"{_TEXT}.models.gpt2": f"{_TEXT}.families.gpt2",
    f"{_TEXT}.models.layers": f"{_TEXT}.model.layers",
    f"{_TEXT}.models.llama": f"{_TEXT}.families.llama",
    f"{_TEXT}.models.llama4": f"{_TEXT}.families.llama4",
    f"{_TEXT}.models.moe": f"{_TEXT}.model.moe",
    f"{_TEXT}.models.qwen3": f"{_TEXT}.families.qwen3",
    f"{_TEXT}.models.qwen3_moe": f"{_TEXT}.families.qwen3",
    f"{_TEXT}.models.vlm": f"{_TEXT}.vision_language.vision_llama",
    f"{_TEXT}.sites": f"{_TEXT}.data.site_split",
    f"{_TEXT}.watching": f"{_TEXT}.language_model",
    f"{_CALLBACKS}.device_stats_monitor": f"{_CALLBACKS}.monitoring.device_stats_monitor",
    f"{_CALLBACKS}.diloco": f"{_CALLBACKS}.weights.diloco",
    f"{_CALLBACKS}.finetuning": f"{_CALLBACKS}.weights.finetuning",
    f"{_CALLBACKS}.lr_finder": f"{_CALLBACKS}.learning_rate_finder",
    f"{_CALLBACKS}.lr_monitor": f"{_CALLBACKS}.monitoring.lr_monitor",
    f"{_CALLBACKS}.model_checkpoint": f"{_CALLBACKS}.checkpoint.model_checkpoint",
    f"{_CALLBACKS}.model_summary": f"{_CALLBACKS}.monitoring.model_summary",
    f"{_CALLBACKS}.on_exception_checkpoint": f"{_CALLBACKS}.checkpoint.on_exception_checkpoint",
    f"{_CALLBACKS}.pipeline_timeline": f"{_CALLBACKS}.monitoring.pipeline_timeline",
    f"{_CALLBACKS}.progress_bar": f"{_CALLBACKS}.progress.progress_bar",
    f"{_CALLBACKS}.pruning": f"{_CALLBACKS}.weights.pruning",
    f"{_CALLBACKS}.rich_progress_bar": f"{_CALLBACKS}.progress.rich_progress",
    f"{_CALLBACKS}.run_report": f"{_CALLBACKS}.monitoring.run_report",
    f"{_CALLBACKS}.spike": f"{_CALLBACKS}.loss_guard",
    f"{_CALLBACKS}.spike_detection": f"{_CALLBACKS}.loss_guard",
    f"{_CALLBACKS}.stochastic_weight_averaging": f"{_CALLBACKS}.weights.stochastic_weight_averaging",
    f"{_CALLBACKS}.throughput_monitor": f"{_CALLBACKS}.monitoring.throughput_monitor",
    f"{_CALLBACKS}.tqdm_progress": f"{_CALLBACKS}.progress.tqdm_progress",
    f"{_CALLBACKS}.weight_averaging": f"{_CALLBACKS}.weights.weight_averaging",
    "arclight.trainer.pausing": f"{_CALLBACKS}.pause",
    "arclight.vision.detector": "arclight.vision.tasks.detection",
    "arclight.vision.plots": "arclight.vision.results.plots",
    "arclight.vision.processing": "arclight.vision.tasks.processing",
    "arclight.vision.settings": "arclight.vision.tasks.settings",
    "arclight.vision.sites": "arclight.vision.data.site_split",
}
"""Former module to the one that has its public classes now; `RENAMED` is looked up afterwards."""

RENAMED = {
    "arclight.trainer.tuner.batch_size_scaling:BatchSizeFinder": f"{_CALLBACKS}.batch_size_finder:BatchSizeFinder",
    "arclight.trainer.tuner.lr_finder:LearningRateFinder": f"{_CALLBACKS}.learning_rate_finder:LearningRateFinder",
    **{
        f"arclight.optim.settings:{name}": f"arclight.optim.schedule_settings:{name}"
        for name in ("Constant", "Cosine", "InverseSqrt", "Linear", "WSD")
    },
    **{
        f"arclight.trainer.settings:{name}": f"{_CALLBACKS}.settings:{name}"
        for name in ("Checkpointing", "Diloco", "EMA", "Guard", "Stopping", "Timeline")
    },
    f"{_TEXT}.data.site_split:Share": f"{_TEXT}.data.site_split:SiteShare",
    f"{_TEXT}.language_model:Speed": f"{_TEXT}.language_model:TokenThroughput",
    f"{_TEXT}.language_model:Samples": f"{_TEXT}.language_model:TextSamples",
    f"{_TEXT}.settings:Language": f"{_TEXT}.settings:LanguageTask",
    f"{_TEXT}.settings:Sampling": f"{_TEXT}.training_settings:Sampling",
    f"{_TEXT}.settings:Unigram": f"{_TEXT}.training_settings:Unigram",
    f"{_TEXT}.vision_language.vision_llama:VisionConfig": f"{_TEXT}.vision_language.siglip:VisionConfig",
    f"{_TEXT}.vision_language.vision_llama:VisionEncoder": f"{_TEXT}.vision_language.siglip:VisionEncoder",
    "arclight.vision.data.site_split:Share": "arclight.vision.data.site_split:SiteShare",
    "arclight.vision.tasks.settings:Augment": "arclight.vision.data.augment_settings:Augment",
    "arclight.vision.tasks.settings:Detection": "arclight.vision.tasks.settings:DetectionTask",
}
"""``module:Class``, after `MOVED`, to the module and name that the class has now."""


def current(name: str) -> str:
    """Return the present form of ``package.module:Class``; unchanged if it has no entry."""
    module, colon, qualified = name.partition(":")
    place = f"{MOVED.get(module, module)}{colon}{qualified}"
    return RENAMED.get(place, place)
