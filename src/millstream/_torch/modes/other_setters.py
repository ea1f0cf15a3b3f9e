"""Setters of PyTorch's of which none of ``switches`` is the subject: who sees what they set, or why nobody need.

A test finds the setters of the PyTorch that runs, and fails for one that is in neither table. Found on torch 2.11 and
2.13.
"""

from __future__ import annotations

_OTHER_SETTERS = (
    (
        "beside these switches, every call asks for it: see ``millstream._torch.modes.active_modes``",
        """
        torch.set_grad_enabled torch.enable_grad torch.autograd.set_grad_enabled torch.autograd.enable_grad
        torch.autograd.grad_mode.set_grad_enabled torch.autograd.grad_mode.enable_grad _set_grad_enabled
        torch.set_default_device torch.utils._device.set_device torch.cuda.set_device _cuda_setDevice
        torch.accelerator.set_device_index torch.accelerator.set_device_idx torch.set_anomaly_enabled
        torch.autograd.set_detect_anomaly torch.autograd.anomaly_mode.set_detect_anomaly set_anomaly_enabled
        torch.set_autocast_enabled torch.set_autocast_dtype torch.set_autocast_cache_enabled
        torch.set_autocast_cpu_enabled torch.set_autocast_cpu_dtype torch.set_autocast_gpu_dtype
        set_autocast_enabled set_autocast_dtype set_autocast_cache_enabled set_autocast_cpu_enabled
        set_autocast_cpu_dtype set_autocast_gpu_dtype torch.autograd.graph.disable_saved_tensors_hooks
        _set_dispatch_mode _unset_dispatch_mode
        """,
    ),
    (
        "it sets some of the switches, which are seen",
        """
        torch.set_deterministic_debug_mode
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction_split_k
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction_split_k
        torch.nn.attention.restore_flash_attention_impl _set_sdp_use_fa3
        torch.backends.python_native.enable_operations torch.backends.python_native.disable_operations
        torch.backends.python_native.enable_dispatch_keys torch.backends.python_native.disable_dispatch_keys
        torch.backends.python_native.triton.enabled torch.backends.python_native.triton.enable
        torch.backends.python_native.triton.disable torch.backends.python_native.cutedsl.enabled
        torch.backends.python_native.cutedsl.enable torch.backends.python_native.cutedsl.disable
        """,
    ),
    (
        "autograd runs when a step is traced and in the backward pass of a compiled model, and obeys it itself",
        """
        torch.autograd.set_multithreading_enabled torch.autograd.grad_mode.set_multithreading_enabled
        _set_multithreading_enabled _set_view_replay_enabled _set_fwd_grad_enabled _set_autograd_fallback_mode
        _autograd._set_creation_meta torch.autograd.graph.allow_mutation_on_saved_tensors
        _set_graph_exec_group _functorch.set_inplace_requires_grad_allowed
        _functorch.set_single_level_autograd_function_allowed _functorch._set_dynamic_layer_keys_included
        _functorch._set_vmap_fallback_enabled torch.utils.checkpoint.set_checkpoint_early_stop
        torch.utils.checkpoint.set_device_states
        """,
    ),
    (
        "it is the state of a generator, which each call reads and moves on",
        """
        torch.set_rng_state torch.random.set_rng_state torch.cuda.set_rng_state torch.cuda.set_rng_state_all
        torch.cuda.random.set_rng_state torch.cuda.random.set_rng_state_all
        """,
    ),
    (
        "it is a register of the processor, which kernels obey",
        "torch.set_flush_denormal set_flush_denormal",
    ),
    (
        "it decides where memory or work is, and no result",
        """
        torch.set_num_interop_threads set_num_interop_threads torch.cuda.set_stream
        torch.accelerator.set_stream _cuda_setStream torch.cuda.set_per_process_memory_fraction
        torch.cuda.memory.set_per_process_memory_fraction _cuda_setMemoryFraction _cuda_setMemoryMetadata
        _cuda_setCheckpointPoolState torch.cuda.use_mem_pool torch.cuda.memory.use_mem_pool
        torch.backends.cuda.cufft_plan_cache.max_size torch.cpu.set_device _set_default_mobile_cpu_allocator
        _unset_default_mobile_cpu_allocator _set_cached_tensors_enabled
        torch.autograd.graph.set_override_stale_capture_stream _set_override_stale_capture_stream
        torch.multiprocessing.set_sharing_strategy torch.multiprocessing.set_start_method
        torch.multiprocessing.set_executable torch.multiprocessing.set_forkserver_preload
        _cuda_clearCublasWorkspaces torch.hub.set_dir
        """,
    ),
    (
        "it chooses among kernels by their times, for the same result",
        """
        torch.cuda.tunable.enable torch.cuda.tunable.tuning_enable torch.cuda.tunable.record_untuned_enable
        torch.cuda.tunable.set_filename torch.cuda.tunable.set_max_tuning_duration
        torch.cuda.tunable.set_max_tuning_iterations torch.cuda.tunable.set_numerical_check_tolerances
        torch.cuda.tunable.set_rotating_buffer_size _cuda_tunableop_enable _cuda_tunableop_tuning_enable
        _cuda_record_untuned_enable _cuda_tunableop_set_filename _cuda_tunableop_set_max_tuning_duration
        _cuda_tunableop_set_max_tuning_iterations _cuda_tunableop_set_numerical_check_tolerances
        _cuda_tunableop_set_rotating_buffer_size
        """,
    ),
    (
        "it shows, warns, logs or checks",
        """
        torch.set_printoptions torch._tensor_str.set_printoptions torch.set_warn_always _set_warnAlways
        torch._logging.set_logs torch.cuda.set_sync_debug_mode _cuda_set_sync_debug_mode
        torch.distributed.set_debug_level torch.distributed.set_debug_level_from_env
        torch.utils.checkpoint.set_checkpoint_debug_enabled
        torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch
        _set_warn_on_accumulate_grad_stream_mismatch _set_backcompat_broadcast_warn
        _set_backcompat_keepdim_warn _set_warn_deprecated_on_mutable_data_ptr
        _set_check_sparse_tensor_invariants _set_print_stack_traces_on_fatal_signal
        _functorch._set_vmap_fallback_warning_enabled _set_storage_access_error_msg
        _set_storage_data_ptr_access_error_msg _set_throw_on_mutable_data_ptr
        _set_should_use_format_with_string_table _set_thread_name torch.set_vital set_vital
        _set_skip_next_torch_function torch.serialization.set_crc32_options
        torch.serialization.set_default_load_endianness torch.serialization.set_default_mmap_options
        _autograd._disable_profiler _autograd._disable_profiler_legacy _autograd._enable_profiler
        _autograd._enable_profiler_legacy _autograd._enable_record_function _autograd._set_empty_test_observer
        _profiler._disable_execution_trace_observer _profiler._enable_execution_trace_observer
        _profiler._set_cuda_sync_enabled_val _profiler._set_fwd_bwd_enabled_val
        _profiler._set_record_concrete_inputs_enabled_val
        """,
    ),
    (
        "what it changes is made outside of a step, or is seen as the state that it changes",
        """
        torch.__future__.set_overwrite_module_params_on_conversion
        torch.__future__.set_swap_module_params_on_conversion torch.utils.set_module _set_conj _set_neg
        _set_tensor_metadata
        """,
    ),
    (
        "Dynamo obeys it itself",
        """
        torch.compiler.set_stance torch._dynamo.set_stance torch.compiler.set_default_backend
        torch.compiler.set_enable_guard_collectives torch._dynamo.set_recursion_limit torch.compiler.disable
        torch._dynamo.disable torch.compiler.allow_in_graph torch._dynamo.allow_in_graph
        torch._dynamo.allow_c_slot torch._dynamo.disable_nested_graph_breaks
        """,
    ),
    (
        "what it concerns is not captured: other devices, torch.jit, quantization as it was, distributed tensors",
        """
        torch.backends.mkldnn.allow_tf32 _set_onednn_allow_tf32 torch.jit.enable_onednn_fusion
        torch.jit.freeze torch.jit.set_fusion_strategy torch.jit.set_module _set_graph_executor_optimize
        _enable_mobile_interface_call_export _set_dtensor_allow_implicit_replication
        torch.set_autocast_ipu_dtype torch.set_autocast_ipu_enabled torch.set_autocast_xla_dtype
        torch.set_autocast_xla_enabled set_autocast_ipu_dtype set_autocast_ipu_enabled set_autocast_xla_dtype
        set_autocast_xla_enabled
        """,
    ),
    (
        "PyTorch sets it itself, for as long as it traces or calls something",
        """
        _set_meta_in_tls_dispatch_include _set_only_lift_cpu_tensors _set_torch_function_state
        _set_tracing_state _set_value_trace _set_worker_pids _set_worker_signal_handlers
        _set_generator_metaclass torch.overrides.enable_reentrant_dispatch
        torch.multiprocessing.allow_connection_pickling torch.multiprocessing.freeze_support
        """,
    ),
)

ELSEWHERE = {name: why for why, names in _OTHER_SETTERS for name in names.split()}
"""Setters of what is no switch, or none of its own, by name; those of ``torch._C`` without the front part."""

SINCE_2_13 = frozenset(
    """
    _set_generator_metaclass  _set_override_stale_capture_stream
    _set_skip_next_torch_function torch._dynamo.allow_c_slot torch.compiler.set_default_backend
    torch.autograd.graph.set_override_stale_capture_stream torch.backends.python_native.enable_operations
    torch.backends.python_native.disable_operations torch.backends.python_native.enable_dispatch_keys
    torch.backends.python_native.disable_dispatch_keys torch.backends.python_native.triton.enabled
    torch.backends.python_native.triton.enable torch.backends.python_native.triton.disable
    torch.backends.python_native.cutedsl.enabled torch.backends.python_native.cutedsl.enable
    torch.backends.python_native.cutedsl.disable
    """.split()
)
"""Those that torch 2.11 has not."""

BEFORE_2_13 = frozenset(
    "torch.set_vital set_vital _set_storage_access_error_msg _set_storage_data_ptr_access_error_msg".split()
)
"""Those that torch 2.13 has no more. Those that begin with ``_cuda_`` are there where PyTorch is built for CUDA."""
