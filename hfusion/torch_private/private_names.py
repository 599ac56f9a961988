"""The table of torch's private names: purpose, versions of torch they were tried on, what happens without them.

Underscored names that torch's documentation and the signatures of its public functions use are not private in this
sense: see `API`. The operators below ``torch.ops`` are none either.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

API = frozenset(
    {
        "torch._assert",
        "torch._foreach_add_",
        "torch._foreach_copy_",
        "torch._foreach_div_",
        "torch._foreach_norm",
        "torch._ops.OpOverload",
        "torch._ops.OpOverloadPacket",
        "torch.utils._python_dispatch.TorchDispatchMode",
        "torch.utils._pytree",
    }
)
"""Underscored names that all files may use."""


@dataclass(frozen=True)
class PrivateNames:
    """Names of torch that its documentation does not promise, used for one purpose.

    Attributes:
        purpose: what they are used for; no two rows have the same.
        names: ``"module: name name; module: name"``, and for attributes of objects ``"a Tensor: name name"``.
        tried: the first and the last version of torch on which they were tried.
        without: what happens on a torch that has no such names.
        everywhere: whether other folders use them too: attributes that have no public form.
    """

    purpose: str
    names: str
    tried: str
    without: str
    everywhere: bool = False

    def pairs(self) -> Iterator[tuple[str, str]]:
        """Yield each name with its owner: a module, a class, or "a Tensor"."""
        for part in self.names.split("; "):
            owner, _, names = part.partition(": ")
            yield from ((owner, name) for name in names.split())


_AT_IMPORT = "the file that uses them cannot be imported"
_AT_USE = "the first use raises AttributeError"
_SLOWER = "compiling takes longer; the program is the same"
_ALONE = "the program is called through torch's wrappers, by one thread"

PRIVATE_NAMES = (
    # dispatch_modes.py
    PrivateNames(
        "hide the active dispatch modes from code that is run in between",
        "torch.utils._python_dispatch: _disable_current_modes; torch.utils._mode_utils: no_dispatch",
        "2.11 to 2.14",
        _AT_IMPORT,
    ),
    PrivateNames(
        "look at tensor subclasses without their overrides",
        "torch._C: DisableTorchFunction DisableTorchFunctionSubclass",
        "2.11 to 2.14",
        _AT_IMPORT,
    ),
    PrivateNames(
        "infer shapes by the operators' Python forms",
        "torch._dispatch.python: enable_python_dispatcher",
        "2.11 to 2.14",
        _AT_IMPORT,
    ),
    PrivateNames(
        "record operators before they are decomposed",
        "torch._C.DispatchKey: PreDispatch; torch._subclasses.schema_check_mode: SchemaCheckMode",
        "2.11 to 2.14",
        _AT_IMPORT,
    ),
    PrivateNames("know that a dispatch mode is active", "torch._C: _len_torch_dispatch_stack", "2.11 to 2.14", _AT_USE),
    PrivateNames(
        "hide function modes of an outer export",
        "torch.overrides: _get_current_function_mode_stack _pop_mode _push_mode",
        "2.11 to 2.14",
        _AT_USE,
    ),
    # thread_draws.py
    PrivateNames(
        "draw from a generator of the thread",
        "torch._C: DispatchKeySet _ExcludeDispatchKeyGuard _ForceDispatchKeyGuard _IncludeDispatchKeyGuard "
        "_dispatch_key_parse _dispatch_tls_local_exclude_set _dispatch_tls_local_include_set _jit_get_all_schemas "
        "_len_torch_dispatch_stack; torch._ops: _HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS "
        "_higher_order_ops; torch.random: default_generator; a Generator: _cdata",
        "2.11 to 2.14",
        _AT_USE,
    ),
    # seeding.py
    PrivateNames(
        "seed devices that are not in use yet",
        "torch.cuda: _initialization_lock _lazy_seed_tracker",
        "2.11 to 2.14",
        _AT_USE,
    ),
    # operator_tables.py
    PrivateNames(
        "list operators and their kernels",
        "torch._C: _dispatch_get_all_op_names _dispatch_has_kernel_for_dispatch_key _dispatch_key_for_device",
        "2.11 to 2.14",
        _AT_USE,
    ),
    PrivateNames(
        "decompose operators",
        "torch._decomp: decomposition_table; torch._refs: linspace; torch._ops: HigherOrderOperator",
        "2.11 to 2.14",
        _AT_IMPORT,
    ),
    # lstm_decomposition.py
    PrivateNames(
        "correct the last states in torch 2.11's decomposition of an LSTM",
        "torch._decomp.decompositions: one_layer_lstm; torch.utils._mode_utils: no_dispatch",
        "2.11 to 2.14",
        "nothing is corrected",
    ),
    # fake_tensors.py
    PrivateNames(
        "infer shapes with tensors without values",
        "torch._guards: detect_fake_mode; torch._subclasses.fake_tensor: DataDependentOutputException "
        "DynamicOutputShapeException FakeTensor FakeTensorMode UnsupportedFakeTensorException",
        "2.11 to 2.14",
        _AT_IMPORT,
    ),
    PrivateNames(
        "name the symbols of dynamic sizes",
        "torch._dynamo.source: ConstantSource",
        "2.11 to 2.14",
        "steps are not compiled",
    ),
    # dynamo_state.py
    PrivateNames(
        "check cheaply that tensors are as at the last call",
        "torch._C._dynamo.guards: TensorGuards",
        "2.11 to 2.14",
        _AT_IMPORT,
    ),
    PrivateNames(
        "take Dynamo's lock before hfusion's own",
        "torch._dynamo.convert_frame: compile_lock",
        "2.11 to 2.14",
        "the first use raises ImportError",
    ),
    PrivateNames("capture inside a trace of Dynamo", "torch._guards: tracing", "2.11 to 2.14", _AT_IMPORT),
    # export_state.py
    PrivateNames(
        "report an export to its own thread only",
        "torch.compiler: _is_compiling_flag _is_exporting_flag; torch.export._trace: _compiling_state_context "
        "_EXPORT_FLAGS _EXPORT_MODULE_HIERARCHY",
        "2.11 to 2.14",
        "captures raise KeyError",
    ),
    PrivateNames(
        "catch errors of submodules while an export traces",
        "torch.fx.experimental.proxy_tensor._ModuleStackTracer: call_module",
        "2.13 to 2.14",
        "captures raise ImportError",
    ),
    PrivateNames(
        "know calls of torch.func in an exported graph", "torch._functorch: predispatch", "2.11 to 2.14", _AT_IMPORT
    ),
    PrivateNames(
        "know by its frames which code calls",
        "torch: _tensor; torch._subclasses: fake_tensor",
        "2.11 to 2.14",
        "reads of values by torch's own code count as those of forward",
    ),
    PrivateNames(
        "export with arguments in containers without names",
        "torch.utils._pytree: SUPPORTED_NODES",
        "2.11 to 2.15",
        "captures raise AttributeError",
    ),
    # tracer_warnings.py
    PrivateNames(
        "silence tracers",
        "torch.hub: tqdm _Faketqdm; torch.fx.interpreter: tqdm; torch.export: _trace",
        "2.11 to 2.14",
        "a progress bar of torch leaves a thread behind, and failed exports print their graph",
    ),
    # functorch.py
    PrivateNames(
        "know the transforms of torch.func around a call",
        "torch._C._functorch: TransformType get_interpreter_stack get_unwrapped is_batchedtensor "
        "is_functorch_wrapped_tensor maybe_get_bdim peek_interpreter_stack; torch.autograd.forward_ad: "
        "_current_level",
        "2.11 to 2.14",
        _AT_USE,
    ),
    PrivateNames(
        "run code outside of the transforms around it",
        "torch._C._autograd: _saved_tensors_hooks_disable _saved_tensors_hooks_enable "
        "_saved_tensors_hooks_get_disabled_error_message; torch._C: _vmapmode_decrement_nesting "
        "_vmapmode_increment_nesting; torch._functorch.pyfunctorch: temporarily_clear_interpreter_stack; "
        "torch.autograd.forward_ad: _set_fwd_grad_enabled",
        "2.11 to 2.14",
        _AT_IMPORT,
    ),
    PrivateNames(
        "refuse the loops of vmap",
        "torch._C._functorch: _is_vmap_fallback_enabled _set_vmap_fallback_enabled",
        "2.11 to 2.14",
        _AT_USE,
    ),
    # autograd_engine.py
    PrivateNames(
        "follow a backward pass to its end",
        "torch._C: _current_graph_task_id; torch._C._functions: AccumulateGrad; torch.autograd.Variable: "
        "_execution_engine; an autograd.Function: _backward_cls",
        "2.11 to 2.15",
        _AT_IMPORT,
    ),
    PrivateNames(
        "take off hooks on saved tensors",
        "torch._C._autograd: _pop_saved_tensors_default_hooks _push_saved_tensors_default_hooks "
        "_top_saved_tensors_default_hooks",
        "2.11 to 2.14",
        _AT_USE,
    ),
    PrivateNames(
        "write buffers that autograd does not read again",
        "torch.autograd.grad_mode: _unsafe_preserve_version_counter",
        "2.11 to 2.14",
        _AT_IMPORT,
    ),
    PrivateNames("let a profiler see each step", "torch._C._autograd: _profiler_enabled", "2.11 to 2.14", _AT_USE),
    PrivateNames("know the borders of no_grad in graphs", "torch._C: _set_grad_enabled", "2.11 to 2.14", _AT_IMPORT),
    # replaced_functions.py
    PrivateNames(
        "trace torch.autograd.grad inside forward",
        "torch.autograd: _engine_run_backward",
        "2.11 to 2.14",
        "such a forward runs member by member",
    ),
    PrivateNames(
        "note where code computes with sizes",
        "torch.SymInt: __add__; torch.SymFloat: __add__",
        "2.11 to 2.14",
        "members that differ in numbers are not captured separately",
    ),
    PrivateNames(
        "refuse custom backwards in a capture",
        "torch.autograd.Function: apply",
        "2.11 to 2.14",
        "captures raise KeyError",
    ),
    # autocast.py
    PrivateNames(
        "know autocast, and its borders in graphs",
        "torch._C: _is_any_autocast_enabled; torch.amp.autocast_mode: _enter_autocast _exit_autocast",
        "2.11 to 2.14",
        _AT_IMPORT,
    ),
    # module_hooks.py
    PrivateNames(
        "know hooks of all modules",
        "torch.nn.modules.module: _global_backward_hooks _global_backward_pre_hooks _global_forward_hooks "
        "_global_forward_pre_hooks _has_any_global_hook",
        "2.11 to 2.14",
        _AT_IMPORT,
    ),
    PrivateNames(
        "know parametrizations and norms by their class, and compute the former without their cache",
        "torch.nn.modules.batchnorm: _BatchNorm; torch.nn.utils.parametrizations: _Orthogonal; "
        "torch.nn.utils.parametrize: _cache _cache_enabled",
        "2.11 to 2.14",
        _AT_IMPORT,
    ),
    # optimizer_hooks.py
    PrivateNames(
        "know hooks of the steps of optimizers",
        "torch.optim.optimizer: _global_optimizer_post_hooks _global_optimizer_pre_hooks; an Optimizer: "
        "_optimizer_step_post_hooks _optimizer_step_pre_hooks",
        "2.11 to 2.14",
        _AT_USE,
    ),
    PrivateNames(
        "warn of optimizers and norms that couple members",
        "torch.nn.utils.clip_grad: _group_tensors_by_device_and_dtype; torch.optim.Optimizer: add_param_group "
        "zero_grad",
        "2.11 to 2.14",
        "clip_grad_norm_ over an array is not warned of",
    ),
    # dataloader_workers.py
    PrivateNames(
        "end the workers of a DataLoader",
        "torch.utils.data._utils.signal_handling: _remove_worker_pids; torch.utils.data.dataloader: "
        "_MultiProcessingDataLoaderIter; a DataLoader: _iterator; an iterator of a DataLoader: _index_queues "
        "_persistent_workers _shutdown_workers _worker_pids_set _worker_result_queue _workers",
        "2.11 to 2.14",
        _AT_IMPORT,
    ),
    # inductor_settings.py
    PrivateNames(
        "compile a graph that hfusion has traced",
        "torch._inductor: compile",
        "2.11 to 2.14",
        "steps are not compiled",
    ),
    PrivateNames(
        "read and set Inductor's settings", "torch._inductor.config: _config _is_default patch", "2.11 to 2.14", _AT_USE
    ),
    # graph_passes.py
    PrivateNames(
        "rewrite graphs before Inductor generates code",
        "torch._inductor.config: post_grad_custom_post_pass; torch._inductor.custom_graph_pass: CustomGraphPass "
        "get_hash_for_files",
        "2.11 to 2.14",
        "steps are not compiled",
    ),
    # inductor_patches.py
    PrivateNames(
        "try one set of vector instructions only",
        "torch._inductor.config.cpp: simdlen; torch._inductor.cpu_vec_isa: supported_vec_isa_list "
        "valid_vec_isa_list x86_isa_checker",
        "2.11 to 2.14",
        _SLOWER,
    ),
    PrivateNames(
        "keep numbers as tensors",
        "torch.fx.passes._tensorify_python_scalars: _is_tensorify_enabled",
        "2.13 to 2.14",
        "steps with numbers in float64 may not compile",
    ),
    PrivateNames(
        "fill the table of dtypes once",
        "torch._inductor.codegen.common: pointwise_overrides_data; torch._inductor.dtype_propagation: "
        "DtypePropagationOpsHandler; torch._inductor.utils: op_dtype_propagation_rules",
        "2.11 to 2.14",
        _SLOWER,
    ),
    PrivateNames(
        "precompile all headers",
        "torch._inductor.codecache.CppWrapperCodeCache: _get_uncompiled_header; torch._inductor.codecache: "
        "_get_cpp_prefix_header",
        "2.11 to 2.14",
        _SLOWER,
    ),
    # cpp_entry.py
    PrivateNames(
        "call a compiled step past torch's wrappers",
        "torch._C._aoti: alloc_tensors_by_stealing_from_void_ptrs unsafe_alloc_void_ptrs_from_tensors; "
        "torch._C._dynamo.guards: _torchinductor_pyobject_tensor_data_ptr",
        "2.11 to 2.14",
        _ALONE,
    ),
    # cpp_block_entry.py
    PrivateNames(
        "let several threads call a compiled step",
        "torch._inductor.codecache.CppWrapperCodeCache: load_pybinding",
        "2.11 to 2.14",
        _ALONE,
    ),
    # storages.py
    PrivateNames("count the users of the memory of a tensor", "torch._C: _storage_Use_Count", "2.11 to 2.14", _AT_USE),
    # Attributes that all files read
    PrivateNames(
        "know writes, hooks and memory of tensors",
        "a Tensor: _backward_hooks _post_accumulate_grad_hooks _version; an UntypedStorage: _cdata",
        "2.11 to 2.14",
        _AT_USE,
        everywhere=True,
    ),
    PrivateNames(
        "read the tables of modules",
        "a Module: _backward_hooks _backward_pre_hooks _buffers _forward_hooks _forward_pre_hooks "
        "_load_from_state_dict _modules _non_persistent_buffers_set _parameters _save_to_state_dict; a state "
        "dict: _metadata; a pruning method: _tensor_name",
        "2.11 to 2.14",
        _AT_USE,
        everywhere=True,
    ),
    PrivateNames(
        "read schemas and names of operators",
        "an OpOverload: _opname _overloadname _schema; an OpOverloadPacket: _qualified_op_name",
        "2.11 to 2.14",
        _AT_USE,
        everywhere=True,
    ),
    PrivateNames(
        "let a scheduler see the step of an array's optimizer",
        "the step of an optimizer: _opt_called",
        "2.11 to 2.14",
        "schedulers warn that no optimizer has stepped",
        everywhere=True,
    ),
)
