"""Map each of Lightning's public names to ours; list the refused ones with reasons.

A row is (Lightning's modules below ``lightning``, our module, names); ``Theirs=ours`` is a name that differs. A name is
in the table only if it exists, which a test checks by fetching each. `_NOT_OFFERED` has the names that are refused: they can be
imported and asked about, and say why when they are used.

`modules` makes Lightning's import paths from the table; stubs (``tests/compat/write_stubs.py``) and the guide in ``docs`` are written
from it too. To offer another name, add it to a row and write the stubs again. A name that users import today must stay; our modules may
move if their rows follow.
"""

from __future__ import annotations

from arclight.fabric.accelerators import NO_XLA as _XLA
from arclight.trainer.loggers import NO_NEPTUNE as _NEPTUNE

__version__ = "2.6.6"


FABRIC: tuple[tuple[str, str, str], ...] = (
    (
        "fabric.accelerators pytorch.accelerators",
        "arclight.fabric.accelerators",
        "Accelerator CPUAccelerator CUDAAccelerator MPSAccelerator find_usable_cuda_devices",
    ),
    ("fabric.accelerators", "arclight.fabric.accelerators", "ACCELERATOR_REGISTRY"),
    ("pytorch.accelerators", "arclight.fabric.accelerators", "AcceleratorRegistry=ACCELERATOR_REGISTRY"),
    (
        "fabric.accelerators.registry",
        "arclight.fabric.accelerators.accelerator_registry",
        "_AcceleratorRegistry=AcceleratorRegistry",
    ),
    (
        "fabric.accelerators.accelerator pytorch.accelerators.accelerator",
        "arclight.fabric.accelerators.base",
        "Accelerator",
    ),
    ("fabric.accelerators.cpu pytorch.accelerators.cpu", "arclight.fabric.accelerators.devices", "CPUAccelerator"),
    ("fabric.accelerators.cuda pytorch.accelerators.cuda", "arclight.fabric.accelerators.devices", "CUDAAccelerator"),
    ("pytorch.accelerators.cpu", "arclight.fabric.accelerators.devices", "get_cpu_stats"),
    (
        "fabric.accelerators.cuda",
        "arclight.fabric.accelerators.devices",
        "find_usable_cuda_devices is_cuda_available num_cuda_devices",
    ),
    ("fabric.accelerators.mps pytorch.accelerators.mps", "arclight.fabric.accelerators.devices", "MPSAccelerator"),
    (
        "fabric.strategies pytorch.strategies",
        "arclight.fabric.strategies",
        "DDPStrategy FSDPStrategy ModelParallelStrategy ParallelStrategy SingleDeviceStrategy Strategy",
    ),
    ("fabric.strategies.fsdp pytorch.strategies.fsdp", "arclight.fabric.strategies.fsdp", "FSDPStrategy"),
    (
        "fabric.strategies.model_parallel pytorch.strategies.model_parallel",
        "arclight.fabric.strategies.model_parallel",
        "ModelParallelStrategy",
    ),
    (
        "fabric.strategies.parallel pytorch.strategies.parallel",
        "arclight.fabric.strategies.parallel",
        "ParallelStrategy",
    ),
    ("fabric.strategies.ddp pytorch.strategies.ddp", "arclight.fabric.strategies.ddp", "DDPStrategy"),
    (
        "fabric.plugins.collectives fabric.plugins.collectives.torch_collective",
        "arclight.compat.lightning.collectives",
        "TorchCollective",
    ),
    (
        "fabric.plugins.collectives fabric.plugins.collectives.single_device",
        "arclight.compat.lightning.collectives",
        "SingleDeviceCollective",
    ),
    (
        "fabric.plugins.collectives fabric.plugins.collectives.collective",
        "arclight.compat.lightning.collectives",
        "Collective",
    ),
    ("fabric.strategies", "arclight.fabric.strategies.strategy_registry", "STRATEGY_REGISTRY"),
    ("pytorch.strategies", "arclight.fabric.strategies.strategy_registry", "StrategyRegistry=STRATEGY_REGISTRY"),
    (
        "fabric.strategies.registry",
        "arclight.fabric.strategies.strategy_registry",
        "_StrategyRegistry=StrategyRegistry",
    ),
    (
        "pytorch.plugins pytorch.plugins.layer_sync",
        "arclight.fabric.strategies.layer_sync",
        "LayerSync TorchSyncBatchNorm",
    ),
    (
        "fabric.strategies.single_device pytorch.strategies.single_device",
        "arclight.fabric.strategies.base",
        "SingleDeviceStrategy",
    ),
    ("fabric.strategies.strategy pytorch.strategies.strategy", "arclight.fabric.strategies.base", "Strategy"),
    (
        "fabric.plugins fabric.plugins.precision pytorch.plugins pytorch.plugins.precision",
        "arclight.fabric.precision",
        "BitsandbytesPrecision DoublePrecision HalfPrecision MixedPrecision Precision TransformerEnginePrecision",
    ),
    (
        "fabric.plugins.precision.double pytorch.plugins.precision.double",
        "arclight.fabric.precision.true_precision",
        "DoublePrecision",
    ),
    (
        "fabric.plugins.precision.bitsandbytes pytorch.plugins.precision.bitsandbytes",
        "arclight.fabric.precision.low_bit",
        "BitsandbytesPrecision",
    ),
    (
        "fabric.plugins.precision.transformer_engine pytorch.plugins.precision.transformer_engine",
        "arclight.fabric.precision.low_bit",
        "TransformerEnginePrecision",
    ),
    ("fabric.plugins.precision.utils", "arclight.fabric.precision.base", "_DtypeContextManager=DefaultDtype"),
    (
        "fabric.plugins.precision.half pytorch.plugins.precision.half",
        "arclight.fabric.precision.true_precision",
        "HalfPrecision",
    ),
    ("fabric.plugins.precision.amp pytorch.plugins.precision.amp", "arclight.fabric.precision.mixed", "MixedPrecision"),
    (
        "fabric.plugins.precision.precision pytorch.plugins.precision.precision",
        "arclight.fabric.precision.base",
        "Precision",
    ),
    (
        "fabric.plugins fabric.plugins.environments fabric.plugins.environments.cluster_environment "
        "pytorch.plugins.environments",
        "arclight.fabric.environments",
        "ClusterEnvironment",
    ),
    (
        "fabric.plugins.environments pytorch.plugins.environments",
        "arclight.fabric.environments",
        "KubeflowEnvironment LSFEnvironment LightningEnvironment MPIEnvironment SLURMEnvironment TorchElasticEnvironment",
    ),
    (
        "fabric.plugins.environments.lightning",
        "arclight.fabric.environments.clusters",
        "LightningEnvironment",
    ),
    ("fabric.plugins.environments.lightning", "arclight.fabric.environments.clusters", "find_free_network_port"),
    ("fabric.plugins.environments.torchelastic", "arclight.fabric.environments.clusters", "TorchElasticEnvironment"),
    ("fabric.plugins.environments.kubeflow", "arclight.fabric.environments.clusters", "KubeflowEnvironment"),
    ("fabric.plugins.environments.slurm", "arclight.fabric.environments.clusters", "SLURMEnvironment"),
    ("fabric.plugins.environments.lsf", "arclight.fabric.environments.clusters", "LSFEnvironment"),
    ("fabric.plugins.environments.mpi", "arclight.fabric.environments.clusters", "MPIEnvironment"),
)


CALLBACKS: _Rows = (
    (
        "pytorch.callbacks pytorch.callbacks.batch_size_finder",
        "arclight.trainer.callbacks.batch_size_finder",
        "BatchSizeFinder",
    ),
    (
        "pytorch.callbacks pytorch.callbacks.device_stats_monitor",
        "arclight.trainer.callbacks.monitoring.device_stats_monitor",
        "DeviceStatsMonitor",
    ),
    (
        "pytorch.callbacks pytorch.callbacks.early_stopping",
        "arclight.trainer.callbacks.early_stopping",
        "EarlyStopping",
    ),
    (
        "pytorch.callbacks pytorch.callbacks.finetuning",
        "arclight.trainer.callbacks.weights.finetuning",
        "BackboneFinetuning BaseFinetuning",
    ),
    (
        "pytorch.callbacks pytorch.callbacks.gradient_accumulation_scheduler",
        "arclight.trainer.callbacks.gradient_accumulation_scheduler",
        "GradientAccumulationScheduler",
    ),
    (
        "pytorch.callbacks pytorch.callbacks.lr_finder",
        "arclight.trainer.callbacks.learning_rate_finder",
        "LearningRateFinder",
    ),
    (
        "pytorch.callbacks pytorch.callbacks.lr_monitor",
        "arclight.trainer.callbacks.monitoring.lr_monitor",
        "LearningRateMonitor",
    ),
    (
        "pytorch.callbacks pytorch.callbacks.model_checkpoint",
        "arclight.trainer.callbacks.checkpoint.model_checkpoint",
        "ModelCheckpoint",
    ),
    (
        "pytorch.callbacks pytorch.callbacks.model_summary",
        "arclight.trainer.callbacks.monitoring.model_summary",
        "ModelSummary",
    ),
    (
        "pytorch.callbacks pytorch.callbacks.on_exception_checkpoint",
        "arclight.trainer.callbacks.checkpoint.on_exception_checkpoint",
        "OnExceptionCheckpoint",
    ),
    (
        "pytorch.callbacks pytorch.callbacks.prediction_writer",
        "arclight.trainer.callbacks.prediction_writer",
        "BasePredictionWriter",
    ),
    ("pytorch.callbacks pytorch.callbacks.pruning", "arclight.trainer.callbacks.weights.pruning", "ModelPruning"),
    ("pytorch.callbacks pytorch.callbacks.spike", "arclight.trainer.callbacks.loss_guard", "SpikeDetection"),
    (
        "pytorch.callbacks pytorch.callbacks.throughput_monitor",
        "arclight.trainer.callbacks.monitoring.throughput_monitor",
        "ThroughputMonitor",
    ),
    ("pytorch.callbacks pytorch.callbacks.timer", "arclight.trainer.callbacks.timer", "Timer"),
    (
        "pytorch.callbacks pytorch.callbacks.weight_averaging",
        "arclight.trainer.callbacks.weights.weight_averaging",
        "EMAWeightAveraging WeightAveraging",
    ),
    ("pytorch.callbacks pytorch.callbacks.checkpoint", "arclight.trainer.callback", "Checkpoint"),
    ("pytorch.callbacks.early_stopping", "arclight.trainer.callbacks.early_stopping", "EarlyStoppingReason"),
    (
        "pytorch.callbacks pytorch.callbacks.lambda_function",
        "arclight.trainer.callbacks.lambda_callback",
        "LambdaCallback",
    ),
    (
        "pytorch.callbacks pytorch.callbacks.progress pytorch.callbacks.progress.progress_bar",
        "arclight.trainer.callbacks.progress.progress_bar",
        "ProgressBar",
    ),
    (
        "pytorch.callbacks.progress.progress_bar",
        "arclight.trainer.callbacks.progress.progress_bar",
        "get_standard_metrics",
    ),
    (
        "pytorch.callbacks pytorch.callbacks.progress pytorch.callbacks.progress.tqdm_progress",
        "arclight.trainer.callbacks.progress.tqdm_progress",
        "TQDMProgressBar",
    ),
    (
        "pytorch.callbacks.progress.tqdm_progress",
        "arclight.trainer.callbacks.progress.tqdm_progress",
        "Tqdm convert_inf",
    ),
    ("pytorch.callbacks.finetuning", "arclight.trainer.callbacks.weights.finetuning", "multiplicative"),
    ("pytorch.callbacks.prediction_writer", "arclight.trainer.callbacks.prediction_writer", "WriteInterval"),
    (
        "pytorch.callbacks pytorch.callbacks.rich_model_summary",
        "arclight.trainer.callbacks.monitoring.model_summary",
        "RichModelSummary",
    ),
    (
        "pytorch.callbacks pytorch.callbacks.progress pytorch.callbacks.progress.rich_progress",
        "arclight.trainer.callbacks.progress.rich_progress",
        "RichProgressBar",
    ),
    (
        "pytorch.callbacks.progress.rich_progress",
        "arclight.trainer.callbacks.progress.rich_progress",
        "RichProgressBarTheme",
    ),
    (
        "pytorch.callbacks pytorch.callbacks.stochastic_weight_avg",
        "arclight.trainer.callbacks.weights.stochastic_weight_averaging",
        "StochasticWeightAveraging",
    ),
)


_Rows = tuple[tuple[str, str, str], ...]

_CORE: _Rows = (
    (". pytorch pytorch.trainer pytorch.trainer.trainer", "arclight.compat.lightning.trainer", "Trainer"),
    (". pytorch pytorch.core pytorch.core.module", "arclight.trainer.module", "LightningModule=Module"),
    (". pytorch pytorch.core pytorch.core.datamodule", "arclight.trainer.datamodule", "LightningDataModule=DataModule"),
    (". pytorch pytorch.callbacks pytorch.callbacks.callback", "arclight.trainer.callback", "Callback"),
    (". fabric fabric.fabric", "arclight.trainer.fabric.fabric", "Fabric"),
    (
        "fabric.wrappers",
        "arclight.trainer.fabric.wrappers",
        "is_wrapped _FabricModule=FabricModule _FabricOptimizer=FabricOptimizer _FabricDataLoader=FabricDataLoader "
        "_unwrap_objects=unwrap _unwrap_compiled=uncompiled",
    ),
    ("fabric", "arclight.trainer.fabric.wrappers", "is_wrapped"),
    (
        ". pytorch pytorch.trainer fabric fabric.utilities.seed",
        "arclight.fabric.seeding",
        "seed_everything",
    ),
    (". pytorch fabric", "arclight.compat.lightning.names", "__version__"),
    ("fabric fabric.wrappers", "arclight.trainer.fabric.wrappers", "is_wrapped"),
)

_TRAINER: _Rows = (
    ("fabric.utilities.registry", "arclight.fabric.registry", "_load_external_callbacks=load_external_callbacks"),
    (
        "fabric.utilities.spike",
        "arclight.trainer.callbacks.loss_guard",
        "SpikeDetection=FabricSpikeDetection TrainingSpikeException",
    ),
    ("fabric.utilities", "arclight.trainer.throughput", "Throughput ThroughputMonitor measure_flops"),
    ("pytorch.utilities", "arclight.trainer.throughput", "measure_flops"),
    (
        "fabric.utilities.throughput",
        "arclight.trainer.throughput",
        "Throughput ThroughputMonitor measure_flops",
    ),
    ("fabric.utilities.throughput", "arclight.trainer.throughput", "get_available_flops"),
    (
        "pytorch.loggers pytorch.loggers.logger fabric.loggers fabric.loggers.logger",
        "arclight.trainer.loggers.logger",
        "Logger",
    ),
    ("pytorch.loggers.logger", "arclight.trainer.loggers.logger", "DummyExperiment DummyLogger"),
    ("fabric.loggers.logger", "arclight.trainer.loggers.logger", "_DummyExperiment=DummyExperiment"),
    ("pytorch.loggers.logger fabric.loggers.logger", "arclight.trainer.loggers.logger", "rank_zero_experiment"),
    ("pytorch.loggers pytorch.loggers.comet", "arclight.trainer.loggers.comet_logger", "CometLogger"),
    ("pytorch.loggers pytorch.loggers.csv_logs", "arclight.trainer.loggers.csv_logger", "CSVLogger"),
    ("pytorch.loggers.csv_logs", "arclight.trainer.loggers.csv_logger", "ExperimentWriter"),
    ("fabric.loggers.csv_logs", "arclight.trainer.loggers.csv_logger", "_ExperimentWriter=ExperimentWriter"),
    ("fabric.loggers fabric.loggers.csv_logs", "arclight.compat.lightning.fabric_loggers", "CSVLogger=FabricCSVLogger"),
    ("pytorch.loggers pytorch.loggers.mlflow", "arclight.trainer.loggers.mlflow_logger", "MLFlowLogger"),
    ("pytorch.loggers.mlflow", "arclight.trainer.loggers.mlflow_logger", "_get_resolve_tags"),
    ("pytorch.loggers pytorch.loggers.tensorboard", "arclight.trainer.loggers.tensorboard_logger", "TensorBoardLogger"),
    (
        "fabric.loggers fabric.loggers.tensorboard",
        "arclight.compat.lightning.fabric_loggers",
        "TensorBoardLogger=FabricTensorBoardLogger",
    ),
    (
        "pytorch.loggers.utilities",
        "arclight.trainer.loggers.hosted_logger",
        "_scan_checkpoints=scan_checkpoints _version=joint_version",
    ),
    ("pytorch.loggers pytorch.loggers.wandb", "arclight.trainer.loggers.wandb_logger", "WandbLogger"),
    (
        "fabric.utilities.logger",
        "arclight.trainer.loggers.params",
        "_add_prefix=add_prefix _convert_json_serializable=convert_json_serializable _convert_params=convert_params "
        "_flatten_dict=flatten_dict _sanitize_callable_params=sanitize_callable_params _sanitize_params=sanitize_params",
    ),
    ("pytorch.loggers.comet", "arclight.compat.lightning.utilities", "_COMET_AVAILABLE"),
    (
        "pytorch.loggers.mlflow",
        "arclight.compat.lightning.utilities",
        "_MLFLOW_AVAILABLE _MLFLOW_SYNCHRONOUS_AVAILABLE",
    ),
    (
        "pytorch.loggers.tensorboard fabric.loggers.tensorboard",
        "arclight.compat.lightning.utilities",
        "_TENSORBOARD_AVAILABLE",
    ),
    ("fabric.loggers.tensorboard", "arclight.compat.lightning.utilities", "_TENSORBOARDX_AVAILABLE"),
    ("pytorch.loggers.wandb", "arclight.compat.lightning.utilities", "_WANDB_AVAILABLE"),
    ("pytorch.profilers pytorch.profilers.profiler", "arclight.trainer.profilers.profiler", "Profiler"),
    ("pytorch.profilers pytorch.profilers.base", "arclight.trainer.profilers.profiler", "PassThroughProfiler"),
    ("pytorch.profilers pytorch.profilers.simple", "arclight.trainer.profilers.simple", "SimpleProfiler"),
    ("pytorch.profilers pytorch.profilers.advanced", "arclight.trainer.profilers.advanced", "AdvancedProfiler"),
    ("pytorch.profilers pytorch.profilers.pytorch", "arclight.trainer.profilers.pytorch", "PyTorchProfiler"),
    ("pytorch.profilers.pytorch", "arclight.trainer.profilers.pytorch", "RegisterRecordFunction warning_cache"),
    ("pytorch.profilers.pytorch", "arclight.trainer.profilers.pytorch", "ScheduleWrapper=StageSchedule"),
    (
        "fabric.plugins fabric.plugins.io pytorch.plugins pytorch.plugins.io",
        "arclight.trainer.fabric.checkpoint_io",
        "CheckpointIO TorchCheckpointIO",
    ),
    ("fabric.plugins.io.checkpoint_io", "arclight.trainer.fabric.checkpoint_io", "CheckpointIO"),
    (
        "pytorch.plugins pytorch.plugins.io pytorch.plugins.io.async_plugin",
        "arclight.trainer.fabric.checkpoint_io",
        "AsyncCheckpointIO",
    ),
    ("fabric.plugins.io.torch_io", "arclight.trainer.fabric.checkpoint_io", "TorchCheckpointIO"),
    ("pytorch.utilities.compile", "arclight.trainer.loop.verification", "from_compiled"),
    ("pytorch.utilities.compile", "arclight.compat.lightning.utilities", "to_uncompiled"),
    ("pytorch.serve pytorch.serve.servable_module", "arclight.serve.servable", "ServableModule"),
    ("pytorch.serve pytorch.serve.servable_module_validator", "arclight.serve.servable", "ServableModuleValidator"),
    (
        "pytorch.cli",
        "arclight.compat.lightning.cli",
        "LightningCLI instantiate_class instantiate_module",
    ),
    ("pytorch.cli", "arclight.compat.lightning.cli", "SaveConfigCallback"),
    (
        "pytorch.cli",
        "arclight.compat.lightning.cli",
        "LightningArgumentParser ArgsType LRSchedulerCallable LRSchedulerType LRSchedulerTypeTuple LRSchedulerTypeUnion OptimizerCallable "
        "ReduceLROnPlateau",
    ),
    ("pytorch.tuner pytorch.tuner.tuning", "arclight.trainer.tuner.tuning", "Tuner"),
    ("pytorch.tuner.lr_finder", "arclight.trainer.tuner.lr_finder", "_LRFinder=LRFinder"),
    ("pytorch.tuner.batch_size_scaling", "arclight.fabric.memory", "is_oom_error=is_out_of_memory"),
    ("pytorch.utilities.exceptions", "arclight.trainer.loop.progress", "_TunerExitException=StopRun"),
    ("pytorch.core.hooks", "arclight.trainer.datamodule", "DataHooks"),
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
        "arclight.fabric.warnings",
        "PossibleUserWarning",
    ),
    ("pytorch.utilities.rank_zero fabric.utilities.rank_zero", "arclight.fabric.warnings", "WarningCache"),
    (
        "fabric.utilities fabric.utilities.warnings pytorch.utilities",
        "arclight.fabric.warnings",
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
        "arclight.compat.lightning.utilities",
        "LightningEnum",
    ),
    ("pytorch.utilities pytorch.utilities.enums", "arclight.compat.lightning.utilities", "GradClipAlgorithmType"),
    (
        "fabric.utilities fabric.utilities.distributed pytorch.utilities",
        "arclight.compat.lightning.utilities",
        "is_shared_filesystem",
    ),
    (
        "fabric.utilities.data",
        "arclight.compat.lightning.utilities",
        "has_iterable_dataset=reads_a_stream has_len sized_len",
    ),
    (
        "fabric.utilities fabric.utilities.data pytorch.utilities",
        "arclight.compat.lightning.utilities",
        "suggested_max_num_workers",
    ),
    (
        "fabric.utilities.apply_func",
        "arclight.compat.lightning.utilities",
        "convert_tensors_to_scalars convert_to_tensors",
    ),
    ("fabric.utilities.types", "arclight.compat.lightning.types", "CollectibleGroup Optimizable Steppable"),
    ("pytorch.utilities pytorch.utilities.grads", "arclight.compat.lightning.utilities", "grad_norm"),
    ("pytorch.utilities.model_helpers", "arclight.compat.lightning.utilities", "is_overridden"),
    (
        "pytorch.overrides pytorch.overrides.distributed",
        "arclight.compat.lightning.sampling",
        "UnrepeatedDistributedSampler UnrepeatedDistributedSamplerWrapper",
    ),
    ("fabric.utilities.distributed", "arclight.compat.lightning.sampling", "DistributedSamplerWrapper"),
    (
        "pytorch.utilities.data",
        "arclight.compat.lightning.utilities",
        "extract_batch_size has_len_all_ranks warning_cache",
    ),
    ("pytorch.utilities.data", "arclight.compat.lightning.utilities", "has_iterable_dataset=reads_a_stream sized_len"),
    ("pytorch.utilities.signature_utils", "arclight.compat.lightning.utilities", "is_param_in_hook_signature"),
    ("pytorch.utilities pytorch.utilities.parsing", "arclight.trainer.hparams", "is_picklable"),
    ("pytorch.utilities.parsing", "arclight.trainer.hparams", "clean_namespace"),
    (
        "pytorch.utilities.parsing",
        "arclight.compat.lightning.utilities",
        "collect_init_args get_init_args parse_class_init_keys",
    ),
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
    ("pytorch.utilities.memory", "arclight.compat.lightning.utilities", "recursive_detach"),
    (
        "pytorch.utilities.memory",
        "arclight.fabric.memory",
        "garbage_collection_cuda=free_memory is_cuda_out_of_memory=is_out_of_device_memory "
        "is_cudnn_snafu=is_out_of_library_memory is_oom_error=is_out_of_memory is_out_of_cpu_memory=is_out_of_host_memory",
    ),
    (
        "pytorch.utilities pytorch.utilities.parameter_tying",
        "arclight.fabric.modules",
        "find_shared_parameters set_shared_parameters",
    ),
    (
        "pytorch.utilities.types",
        "arclight.compat.lightning.types",
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
        "arclight.compat.lightning.sequences",
        "LightningLSTM LightningTransformer SequenceSampler SimpleLSTM Transformer WikiText2",
    ),
    ("pytorch.demos.lstm", "arclight.compat.lightning.sequences", "LightningLSTM SequenceSampler SimpleLSTM"),
    (
        "pytorch.demos.transformer",
        "arclight.compat.lightning.sequences",
        "Dictionary LightningTransformer PositionalEncoding Transformer WikiText2 tokenize",
    ),
    ("pytorch.demos", "arclight.compat.lightning.boring", "BoringDataModule BoringModel DemoModel"),
    (
        "pytorch.demos.boring_classes",
        "arclight.compat.lightning.boring",
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


_HPU = "HPU devices are not supported; use accelerator='cuda', 'mps' or 'cpu'"
_DP = "one process that drives several devices is slower than one per device; use strategy='ddp'"
_DEEPSPEED = "sharded optimizers, gradients and parameters are strategy='fsdp', in plain torch; use that"
_LITLOGGER = "it reports to one vendor's service; use TensorBoardLogger, CSVLogger or a Logger of your own"
_MNIST = "it downloads a data set; read the files that you have with a DataModule of your own"

_NOT_OFFERED: tuple[tuple[str, str, str], ...] = (
    ("fabric.accelerators pytorch.accelerators", _XLA, "XLAAccelerator"),
    ("fabric.accelerators.xla pytorch.accelerators.xla", _XLA, "XLAAccelerator"),
    ("pytorch.loggers pytorch.loggers.neptune", _NEPTUNE, "NeptuneLogger"),
    ("fabric.strategies", _XLA, "XLAFSDPStrategy"),
    ("fabric.strategies pytorch.strategies", _XLA, "SingleDeviceXLAStrategy XLAStrategy"),
    ("fabric.strategies.xla pytorch.strategies.xla", _XLA, "XLAStrategy"),
    ("fabric.strategies.single_xla pytorch.strategies.single_xla", _XLA, "SingleDeviceXLAStrategy"),
    ("fabric.strategies.xla_fsdp", _XLA, "XLAFSDPStrategy"),
    (
        "fabric.plugins fabric.plugins.precision fabric.plugins.precision.xla "
        "pytorch.plugins pytorch.plugins.precision pytorch.plugins.precision.xla",
        _XLA,
        "XLAPrecision",
    ),
    ("fabric.plugins fabric.plugins.io pytorch.plugins pytorch.plugins.io", _XLA, "XLACheckpointIO"),
    ("fabric.plugins.environments pytorch.plugins.environments", _XLA, "XLAEnvironment"),
    ("pytorch.profilers pytorch.profilers.xla", _XLA, "XLAProfiler"),
    ("pytorch.accelerators", _HPU, "HPUAccelerator"),
    ("pytorch.strategies", _HPU, "HPUParallelStrategy SingleHPUStrategy"),
    ("pytorch.plugins pytorch.plugins.precision", _HPU, "HPUPrecisionPlugin"),
    ("pytorch.plugins pytorch.plugins.io", _HPU, "HPUCheckpointIO"),
    ("fabric.strategies fabric.strategies.dp", _DP, "DataParallelStrategy"),
    (
        "fabric.strategies fabric.strategies.deepspeed pytorch.strategies pytorch.strategies.deepspeed",
        _DEEPSPEED,
        "DeepSpeedStrategy",
    ),
    (
        "fabric.plugins fabric.plugins.precision fabric.plugins.precision.deepspeed "
        "pytorch.plugins pytorch.plugins.precision pytorch.plugins.precision.deepspeed",
        _DEEPSPEED,
        "DeepSpeedPrecision",
    ),
    ("pytorch.demos.mnist_datamodule", _MNIST, "MNIST MNISTDataModule"),
    ("pytorch.loggers pytorch.loggers.litlogger", _LITLOGGER, "LitLogger"),
)


def _reasons() -> dict[str, dict[str, str]]:
    reasons: dict[str, dict[str, str]] = {}
    for modules, reason, names in _NOT_OFFERED:
        for module in modules.split():
            reasons.setdefault(module, {}).update(dict.fromkeys(names.split(), reason))
    return reasons


REFUSED = _reasons()
"""Lightning's module -> name that is refused on purpose -> why, and what to use."""
