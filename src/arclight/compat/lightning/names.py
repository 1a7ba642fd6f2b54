"""Every name that is offered, once: where Lightning's users look for it, and where it lives here.

A row is (Lightning's modules below ``lightning``, our module, names); ``Theirs=ours`` is a name that differs. A name is
in the table only when it exists, which a test checks by fetching each.
"""

from __future__ import annotations

from arclight.compat.lightning.callback_names import CALLBACKS
from arclight.compat.lightning.fabric_names import FABRIC

_OWN = "arclight.compat.lightning"
_LOGGERS = "arclight.trainer.loggers"
_AVAILABILITY = f"{_OWN}.availability"
_PROFILERS = "arclight.trainer.profilers"

_Rows = tuple[tuple[str, str, str], ...]

_CORE: _Rows = (
    (". pytorch pytorch.trainer pytorch.trainer.trainer", f"{_OWN}.trainer", "Trainer"),
    (". pytorch pytorch.core pytorch.core.module", "arclight.trainer.module", "LightningModule=Module"),
    (". pytorch pytorch.core pytorch.core.datamodule", "arclight.trainer.datamodule", "LightningDataModule=DataModule"),
    (". pytorch pytorch.callbacks pytorch.callbacks.callback", "arclight.trainer.callback", "Callback"),
    (". fabric fabric.fabric", "arclight.trainer.fabric", "Fabric"),
    (
        "fabric.wrappers",
        "arclight.trainer.fabric_modules",
        "is_wrapped _FabricModule=FabricModule _FabricOptimizer=FabricOptimizer _FabricDataLoader=FabricDataLoader "
        "_unwrap_objects=unwrap _unwrap_compiled=uncompiled",
    ),
    ("fabric", "arclight.trainer.fabric_modules", "is_wrapped"),
    (
        ". pytorch pytorch.trainer fabric fabric.utilities.seed",
        "arclight.fabric.seeding",
        "seed_everything",
    ),
    (". pytorch fabric", f"{_OWN}.version", "__version__"),
    ("fabric fabric.wrappers", "arclight.trainer.fabric_modules", "is_wrapped"),
)

_TRAINER: _Rows = (
    ("fabric.utilities.registry", "arclight.fabric.registry", "_load_external_callbacks=load_external_callbacks"),
    ("fabric.utilities.spike", "arclight.trainer.spike", "SpikeDetection TrainingSpikeException"),
    ("fabric.utilities", "arclight.trainer.throughput", "Throughput ThroughputMonitor measure_flops"),
    ("pytorch.utilities", "arclight.trainer.throughput", "measure_flops"),
    (
        "fabric.utilities.throughput",
        "arclight.trainer.throughput",
        "Throughput ThroughputMonitor measure_flops",
    ),
    ("fabric.utilities.throughput", "arclight.trainer.throughput", "get_available_flops"),
    ("pytorch.loggers pytorch.loggers.logger fabric.loggers fabric.loggers.logger", f"{_LOGGERS}.logger", "Logger"),
    ("pytorch.loggers.logger", f"{_LOGGERS}.logger", "DummyExperiment DummyLogger"),
    ("fabric.loggers.logger", f"{_LOGGERS}.logger", "_DummyExperiment=DummyExperiment"),
    ("pytorch.loggers.logger fabric.loggers.logger", f"{_LOGGERS}.logger", "rank_zero_experiment"),
    ("pytorch.loggers pytorch.loggers.comet", f"{_LOGGERS}.comet_logger", "CometLogger"),
    ("pytorch.loggers pytorch.loggers.csv_logs", f"{_LOGGERS}.csv_logger", "CSVLogger"),
    ("pytorch.loggers.csv_logs", f"{_LOGGERS}.csv_logger", "ExperimentWriter"),
    ("fabric.loggers.csv_logs", f"{_LOGGERS}.csv_logger", "_ExperimentWriter=ExperimentWriter"),
    ("fabric.loggers fabric.loggers.csv_logs", f"{_LOGGERS}.fabric_loggers", "CSVLogger=FabricCSVLogger"),
    ("pytorch.loggers pytorch.loggers.mlflow", f"{_LOGGERS}.mlflow_logger", "MLFlowLogger"),
    ("pytorch.loggers.mlflow", f"{_LOGGERS}.mlflow_logger", "_get_resolve_tags"),
    ("pytorch.loggers.neptune", f"{_LOGGERS}.neptune_logger", "NeptuneLogger"),
    ("pytorch.loggers pytorch.loggers.tensorboard", f"{_LOGGERS}.tensorboard_logger", "TensorBoardLogger"),
    (
        "fabric.loggers fabric.loggers.tensorboard",
        f"{_LOGGERS}.fabric_loggers",
        "TensorBoardLogger=FabricTensorBoardLogger",
    ),
    (
        "pytorch.loggers.utilities",
        f"{_LOGGERS}.artifacts",
        "_scan_checkpoints=scan_checkpoints _version=joint_version",
    ),
    ("pytorch.loggers pytorch.loggers.wandb", f"{_LOGGERS}.wandb_logger", "WandbLogger"),
    (
        "fabric.utilities.logger",
        f"{_LOGGERS}.params",
        "_add_prefix=add_prefix _convert_json_serializable=convert_json_serializable _convert_params=convert_params "
        "_flatten_dict=flatten_dict _sanitize_callable_params=sanitize_callable_params _sanitize_params=sanitize_params",
    ),
    ("pytorch.loggers.comet", _AVAILABILITY, "_COMET_AVAILABLE"),
    ("pytorch.loggers.mlflow", _AVAILABILITY, "_MLFLOW_AVAILABLE _MLFLOW_SYNCHRONOUS_AVAILABLE"),
    ("pytorch.loggers.tensorboard fabric.loggers.tensorboard", _AVAILABILITY, "_TENSORBOARD_AVAILABLE"),
    ("fabric.loggers.tensorboard", _AVAILABILITY, "_TENSORBOARDX_AVAILABLE"),
    ("pytorch.loggers.wandb", _AVAILABILITY, "_WANDB_AVAILABLE"),
    ("pytorch.profilers pytorch.profilers.profiler", f"{_PROFILERS}.profiler", "Profiler"),
    ("pytorch.profilers pytorch.profilers.base", f"{_PROFILERS}.profiler", "PassThroughProfiler"),
    ("pytorch.profilers pytorch.profilers.simple", f"{_PROFILERS}.simple", "SimpleProfiler"),
    ("pytorch.profilers pytorch.profilers.advanced", f"{_PROFILERS}.advanced", "AdvancedProfiler"),
    ("pytorch.profilers pytorch.profilers.pytorch", f"{_PROFILERS}.pytorch", "PyTorchProfiler"),
    ("pytorch.profilers.pytorch", f"{_PROFILERS}.pytorch", "RegisterRecordFunction warning_cache"),
    ("pytorch.profilers.pytorch", f"{_PROFILERS}.stage_schedule", "ScheduleWrapper=StageSchedule"),
    (
        "fabric.plugins fabric.plugins.io pytorch.plugins pytorch.plugins.io",
        "arclight.trainer.checkpoint.checkpoint_io",
        "CheckpointIO TorchCheckpointIO",
    ),
    ("fabric.plugins.io.checkpoint_io", "arclight.trainer.checkpoint.checkpoint_io", "CheckpointIO"),
    (
        "pytorch.plugins pytorch.plugins.io pytorch.plugins.io.async_plugin",
        "arclight.trainer.checkpoint.checkpoint_io",
        "AsyncCheckpointIO",
    ),
    ("fabric.plugins.io.torch_io", "arclight.trainer.checkpoint.checkpoint_io", "TorchCheckpointIO"),
    ("pytorch.utilities.compile", "arclight.trainer.loop.verification", "from_compiled to_uncompiled"),
    ("pytorch.serve pytorch.serve.servable_module", "arclight.serve.servable", "ServableModule"),
    ("pytorch.serve pytorch.serve.servable_module_validator", "arclight.serve.servable", "ServableModuleValidator"),
    (
        "pytorch.cli",
        f"{_OWN}.cli",
        "LightningCLI instantiate_class instantiate_module",
    ),
    ("pytorch.cli", f"{_OWN}.save_config", "SaveConfigCallback"),
    (
        "pytorch.cli",
        f"{_OWN}.cli_parser",
        "LightningArgumentParser ArgsType LRSchedulerCallable LRSchedulerType LRSchedulerTypeTuple LRSchedulerTypeUnion OptimizerCallable "
        "ReduceLROnPlateau",
    ),
    ("pytorch.tuner pytorch.tuner.tuning", "arclight.trainer.tuner.tuning", "Tuner"),
    ("pytorch.tuner.lr_finder", "arclight.trainer.tuner.lr_finder", "_LRFinder=LRFinder"),
    ("pytorch.tuner.batch_size_scaling", "arclight.fabric.memory", "is_oom_error=is_out_of_memory"),
    ("pytorch.utilities.exceptions", "arclight.trainer.loop.progress", "_TunerExitException=StopRun"),
    ("pytorch.core.hooks", "arclight.trainer.data_hooks", "DataHooks"),
    ("pytorch.core.optimizer", "arclight.trainer.loop.optimizers", "LightningOptimizer=ManagedOptimizer"),
    ("pytorch.trainer.states", "arclight.trainer.loop.progress", "RunningStage TrainerFn TrainerState TrainerStatus"),
    ("pytorch.utilities.types", "arclight.trainer.loop.optimizers", "LRSchedulerConfig"),
)

_UTILITIES: _Rows = (
    ("pytorch.utilities pytorch.utilities.combined_loader", "arclight.data", "CombinedLoader"),
    (
        "fabric.utilities.exceptions pytorch.utilities.exceptions",
        "arclight.fabric.errors",
        "MisconfigurationException=MisconfigurationError",
    ),
    ("pytorch.utilities.exceptions", "arclight.fabric.errors", "SIGTERMException"),
    (
        "fabric.utilities fabric.utilities.rank_zero pytorch.utilities pytorch.utilities.rank_zero",
        "arclight.fabric.rank_zero",
        "rank_zero_deprecation rank_zero_info rank_zero_only rank_zero_warn",
    ),
    (
        "fabric.utilities.rank_zero pytorch.utilities.rank_zero",
        "arclight.fabric.rank_zero",
        "LightningDeprecationWarning rank_zero_debug",
    ),
    (
        "fabric.utilities.warnings pytorch.utilities.warnings",
        "arclight.fabric.warning_kinds",
        "PossibleUserWarning",
    ),
    ("pytorch.utilities.rank_zero fabric.utilities.rank_zero", "arclight.fabric.warning_kinds", "WarningCache"),
    (
        "fabric.utilities fabric.utilities.warnings pytorch.utilities",
        "arclight.fabric.warning_kinds",
        "disable_possible_user_warnings",
    ),
    (
        "fabric.utilities.seed",
        "arclight.fabric.seeding",
        "isolate_rng max_seed_value=MAX_SEED pl_worker_init_function=seed_loader_worker reset_seed",
    ),
    ("pytorch.utilities.seed", "arclight.fabric.seeding", "isolate_rng"),
    (
        "fabric.utilities fabric.utilities.enums pytorch.utilities pytorch.utilities.enums",
        f"{_OWN}.utilities",
        "LightningEnum",
    ),
    ("pytorch.utilities pytorch.utilities.enums", f"{_OWN}.utilities", "GradClipAlgorithmType"),
    (
        "fabric.utilities fabric.utilities.distributed pytorch.utilities",
        "arclight.fabric.filesystem",
        "is_shared_filesystem",
    ),
    ("fabric.utilities.data", "arclight.data.checks", "has_iterable_dataset=reads_a_stream has_len sized_len"),
    (
        "fabric.utilities fabric.utilities.data pytorch.utilities",
        "arclight.data.checks",
        "suggested_max_num_workers",
    ),
    ("fabric.utilities.apply_func", f"{_OWN}.utilities", "convert_tensors_to_scalars convert_to_tensors"),
    ("fabric.utilities.types", f"{_OWN}.types", "CollectibleGroup Optimizable Steppable"),
    ("pytorch.utilities pytorch.utilities.grads", "arclight.optim.gradients", "grad_norm"),
    ("pytorch.utilities.model_helpers", f"{_OWN}.utilities", "is_overridden"),
    (
        "pytorch.overrides pytorch.overrides.distributed",
        f"{_OWN}.sampling",
        "UnrepeatedDistributedSampler UnrepeatedDistributedSamplerWrapper",
    ),
    ("fabric.utilities.distributed", f"{_OWN}.sampling", "DistributedSamplerWrapper"),
    ("pytorch.utilities.data", f"{_OWN}.utilities", "extract_batch_size has_len_all_ranks warning_cache"),
    ("pytorch.utilities.data", "arclight.data.checks", "has_iterable_dataset=reads_a_stream sized_len"),
    ("pytorch.utilities.signature_utils", f"{_OWN}.utilities", "is_param_in_hook_signature"),
    ("pytorch.utilities pytorch.utilities.parsing", "arclight.trainer.hparams", "is_picklable"),
    ("pytorch.utilities.parsing", "arclight.trainer.hparams", "clean_namespace"),
    ("pytorch.utilities.parsing", f"{_OWN}.utilities", "collect_init_args get_init_args parse_class_init_keys"),
    (
        "pytorch.utilities.parsing",
        "arclight.trainer.hparams",
        "lightning_getattr=get_setting lightning_hasattr=has_setting lightning_setattr=set_setting",
    ),
    (
        "pytorch.core.saving",
        "arclight.trainer.hparams",
        "convert load_hparams_from_tags_csv load_hparams_from_yaml save_hparams_to_tags_csv save_hparams_to_yaml update_hparams",
    ),
    ("pytorch.utilities.memory", f"{_OWN}.utilities", "recursive_detach"),
    (
        "pytorch.utilities.memory",
        "arclight.fabric.memory",
        "garbage_collection_cuda=free_memory is_cuda_out_of_memory=is_out_of_device_memory "
        "is_cudnn_snafu=is_out_of_library_memory is_oom_error=is_out_of_memory is_out_of_cpu_memory=is_out_of_host_memory",
    ),
    (
        "pytorch.utilities pytorch.utilities.parameter_tying",
        "arclight.fabric.tying",
        "find_shared_parameters set_shared_parameters",
    ),
    (
        "pytorch.utilities.types",
        f"{_OWN}.types",
        "DistributedDataParallel EVAL_DATALOADERS LRSchedulerConfigType LRSchedulerPLType LRSchedulerType "
        "LRSchedulerTypeTuple LRSchedulerTypeUnion OptimizerConfig OptimizerLRScheduler OptimizerLRSchedulerConfig "
        "STEP_OUTPUT TRAIN_DATALOADERS",
    ),
    (
        "pytorch.utilities pytorch.utilities.combined_loader",
        "arclight.data.combined",
        "CombinedLoader",
    ),
    (
        "fabric.utilities fabric.utilities.apply_func pytorch.utilities",
        "arclight.fabric.batches",
        "move_data_to_device=move_batch",
    ),
    (
        "pytorch.core.mixins pytorch.core.mixins.hparams_mixin",
        "arclight.trainer.hparams",
        "HyperparametersMixin",
    ),
    (
        "fabric.utilities fabric.utilities.data pytorch.utilities pytorch.utilities.parsing",
        "arclight.trainer.hparams",
        "AttributeDict=Hyperparameters",
    ),
    (
        "pytorch.utilities.model_summary pytorch.utilities.model_summary.model_summary",
        "arclight.trainer.summary",
        "LayerSummary ModelSummary get_formatted_model_size get_human_readable_count parse_batch_shape summarize",
    ),
    (
        "pytorch.utilities.model_summary.model_summary",
        "arclight.trainer.summary",
        "LEFTOVER_PARAMS_NAME NOT_APPLICABLE PARAMETER_NUM_UNITS UNKNOWN_SIZE",
    ),
)

_DEMOS: _Rows = (
    (
        "pytorch.demos",
        f"{_OWN}.sequences",
        "LightningLSTM LightningTransformer SequenceSampler SimpleLSTM Transformer WikiText2",
    ),
    ("pytorch.demos.lstm", f"{_OWN}.sequences", "LightningLSTM SequenceSampler SimpleLSTM"),
    (
        "pytorch.demos.transformer",
        f"{_OWN}.sequences",
        "Dictionary LightningTransformer PositionalEncoding Transformer WikiText2 tokenize",
    ),
    ("pytorch.demos", f"{_OWN}.boring", "BoringDataModule BoringModel DemoModel"),
    (
        "pytorch.demos.boring_classes",
        f"{_OWN}.boring",
        "BoringDataModule BoringDataModuleNoLen BoringModel DemoModel IterableBoringDataModule ManualOptimBoringModel Net "
        "RandomDataset RandomDictDataset RandomIterableDataset RandomIterableDatasetWithLen",
    ),
)


def _table(*rooms: _Rows) -> dict[str, dict[str, str]]:
    table: dict[str, dict[str, str]] = {}
    for modules, ours, names in (row for rows in rooms for row in rows):
        for module in modules.split():
            place = table.setdefault("" if module == "." else module, {})
            for pair in names.split():
                theirs, _, own = pair.partition("=")
                place[theirs] = f"{ours}:{own or theirs}"
    return table


NAMES = _table(_CORE, CALLBACKS, _TRAINER, FABRIC, _UTILITIES, _DEMOS)
"""Lightning's module (``""`` is ``lightning`` itself) -> name -> ``"our.module:name"``."""
