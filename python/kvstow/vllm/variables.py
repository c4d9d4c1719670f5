"""Which variables of the environment shape blocks: all that are not known to shape none.

vLLM reads over 300 variables. Some of them let it round weights, activations or sums otherwise,
choose kernels that do, order the numbers of a block otherwise, or take other frames of a video. A
later version of vLLM may have more of them. So each variable of vLLM's counts if it is set, except
those listed here. It counts with the value of its default, too, because vLLM may prefer a kernel
then.
"""

from __future__ import annotations

import os
from typing import Final

from vllm import envs

from kvstow.vllm.digest import content_named, digest_of

# Variables that vLLM does not list: of libraries that round matrix products of 32 bits to fewer, of
# an earlier vLLM, of its processor of `dots3_note`, which compresses the frames of a video, and
# those that its kernels read themselves, to round otherwise or to give way to other kernels.
_UNLISTED: Final = frozenset(
    (
        "AITER_BF16_FP8_MOE_BOUND",
        "DNNL_DEFAULT_FPMATH_MODE",
        "FLA_TRIL_PRECISION",
        "FLA_USE_FAST_OPS",
        "FLA_USE_TMA",
        "FORCE_NUM_KV_SPLITS",
        "HIPBLASLT_ALLOW_TF32",
        "INKLING_GFX950_GLUON",
        "INKLING_MULTIMEM_AR",
        "INKLING_SPLIT_KV",
        "LAMPORT_RS_SCONV",
        "NVIDIA_TF32_OVERRIDE",
        "ONEDNN_DEFAULT_FPMATH_MODE",
        "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
        "TRITON_F32_DEFAULT",
        "USE_DEFAULT_FLA_NORM",
        "USE_FLAGOS",
        "VLLM_ATTENTION_BACKEND",
        "VLLM_CUSTOM_ALLREDUCE_ALGO",
        "VLLM_MINIMAX_M3_MSA_CUTLASS_MIN_BATCH",
        "XHS_VIDEO_JPEG_QUALITY",
    )
)
# Those of vLLM's that shape no block. No version of vLLM has all of them.
_NOT_COUNTED: Final = frozenset(
    " ".join(
        (
            # Where vLLM was built, and where it runs.
            """
            CMAKE_BUILD_TYPE CUDA_HOME CUDA_VISIBLE_DEVICES LD_LIBRARY_PATH LOCAL_RANK MAX_JOBS
            NVCC_THREADS VERBOSE VLLM_BUILD_COMMIT VLLM_BUILD_PIPELINE VLLM_BUILD_URL
            VLLM_CPU_NUM_OF_RESERVED_CPU VLLM_CPU_OMP_THREADS_BIND VLLM_CUDART_SO_PATH
            VLLM_CUDA_COMPATIBILITY_PATH VLLM_DOCKER_BUILD_CONTEXT VLLM_ENABLE_CUDA_COMPATIBILITY
            VLLM_GPU_NIC_PCIE_MAPPING VLLM_HAS_FLASHINFER_CUBIN VLLM_IMAGE_TAG
            VLLM_MAIN_CUDA_VERSION VLLM_NCCL_INCLUDE_PATH VLLM_NCCL_SO_PATH VLLM_NIC_SELECTION_VARS
            VLLM_SKIP_P2P_CHECK VLLM_SKIP_PRECOMPILED_VERSION_SUFFIX VLLM_SKIP_VERSION_SUFFIX
            VLLM_TARGET_DEVICE VLLM_USE_PRECOMPILED VLLM_USE_PRECOMPILED_RUST
            """,
            # Folders and caches.
            """
            VLLM_ALLOW_RUNTIME_LORA_UPDATING VLLM_ASSETS_CACHE VLLM_ASSETS_CACHE_MODEL_CLEAN
            VLLM_CACHE_ROOT VLLM_COMPILE_CACHE_SAVE_FORMAT VLLM_CONFIG_ROOT VLLM_DEEP_GEMM_WARMUP
            VLLM_DISABLE_COMPILE_CACHE VLLM_ENABLE_STARTUP_PLAN VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR
            VLLM_FORCE_AOT_LOAD VLLM_LORA_RESOLVER_CACHE_DIR VLLM_LORA_RESOLVER_HF_REPO_LIST
            VLLM_RPC_BASE_PATH VLLM_TRITON_JIT_WARMUP_NUM_THREADS VLLM_V1_USE_OUTLINES_CACHE
            VLLM_XGRAMMAR_CACHE_MB VLLM_XLA_CACHE_PATH
            """,
            # What others count: plugins, the place of weights, and who prepares images.
            """
            VLLM_MODEL_REDIRECT_PATH VLLM_PLUGINS VLLM_RUST_FRONTEND_PATH VLLM_USE_MODELSCOPE
            VLLM_USE_RUST_FRONTEND
            """,
            # Logs, statistics and checks.
            """
            FORCE_COLOR NO_COLOR VLLM_COMPUTE_NANS_IN_LOGITS VLLM_CONFIGURE_LOGGING
            VLLM_CUSTOM_SCOPES_FOR_PROFILING VLLM_DEBUG_DUMP_PATH VLLM_DEBUG_LOG_API_SERVER_RESPONSE
            VLLM_DEBUG_MFU_METRICS VLLM_DEBUG_WORKSPACE VLLM_DISABLE_LOG_LOGO VLLM_DO_NOT_TRACK
            VLLM_GC_DEBUG VLLM_GPU_SYNC_CHECK VLLM_LOGGING_COLOR VLLM_LOGGING_CONFIG_PATH
            VLLM_LOGGING_LEVEL VLLM_LOGGING_PREFIX VLLM_LOGGING_STREAM VLLM_LOG_BATCHSIZE_INTERVAL
            VLLM_LOG_MODEL_INSPECTION VLLM_LOG_STATS_INTERVAL VLLM_MOONCAKE_STORE_TIER_LOG
            VLLM_NO_USAGE_STATS VLLM_NVTX_SCOPES_FOR_PROFILING VLLM_PATTERN_MATCH_DEBUG
            VLLM_PROCESS_NAME_PREFIX VLLM_RAISE_ON_LOGIT_NANS VLLM_REQUEST_BODY_LOG_LEVEL
            VLLM_RINGBUFFER_WARNING_INTERVAL VLLM_SERVER_DEV_MODE VLLM_TRACE_FUNCTION
            VLLM_USAGE_SOURCE VLLM_USAGE_STATS_SERVER
            """,
            # Limits of time.
            """
            VLLM_CHAT_TEMPLATE_FUEL VLLM_CHAT_TEMPLATE_RENDER_TIMEOUT
            VLLM_ENGINE_ITERATION_TIMEOUT_S VLLM_ENGINE_READY_TIMEOUT_S
            VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS VLLM_HTTP_TIMEOUT_KEEP_ALIVE
            VLLM_KEEP_ALIVE_ON_ENGINE_DEATH VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT
            VLLM_MOONCAKE_CONNECTOR_TIMEOUT VLLM_P2P_HANDSHAKE_TIMEOUT_S VLLM_P2P_IDLE_TIMEOUT_S
            VLLM_REGEX_COMPILATION_TIMEOUT_S VLLM_TOOL_PARSE_REGEX_TIMEOUT_SECONDS
            VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS
            """,
            # How images, audio and videos arrive, but not what reads them: the hash of a block has
            # what arrives, unless the user names it.
            """
            VLLM_AUDIO_FETCH_TIMEOUT VLLM_IMAGE_FETCH_TIMEOUT VLLM_MAX_AUDIO_CLIP_FILESIZE_MB
            VLLM_MAX_AUDIO_DECODE_BYTES VLLM_MAX_AUDIO_DECODE_DURATION_S
            VLLM_MAX_AUDIO_PREPROCESS_WORKERS VLLM_MAX_EMBED_DECODE_BYTES
            VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB VLLM_MAX_MEDIA_REQUEST_DECODE_BYTES
            VLLM_MAX_MEDIA_REQUEST_DOWNLOAD_SIZE_MB VLLM_MEDIA_CACHE VLLM_MEDIA_CACHE_MAX_SIZE_MB
            VLLM_MEDIA_CACHE_TTL_HOURS VLLM_MEDIA_FETCH_MAX_RETRIES VLLM_MEDIA_LOADING_THREAD_COUNT
            VLLM_MEDIA_URL_ALLOW_REDIRECTS VLLM_VIDEO_FETCH_TIMEOUT
            """,
            # Requests and answers. The tokens are in a block's hash.
            """
            VLLM_ALLOW_LONG_MAX_MODEL_LEN VLLM_API_KEY VLLM_BEAM_ALWAYS_CONSTRAIN_OUTPUT
            VLLM_DISABLE_REQUEST_ID_RANDOMIZATION VLLM_ENABLE_COHERE_API
            VLLM_ENABLE_RESPONSES_API_STORE VLLM_ENFORCE_STRICT_TOOL_CALLING
            VLLM_GPT_OSS_HARMONY_SYSTEM_INSTRUCTIONS VLLM_GPT_OSS_SYSTEM_TOOL_MCP_LABELS
            VLLM_HTTP_MAX_REQUEST_BODY_SIZE VLLM_MAX_BAD_WORDS_TOTAL_TOKENS
            VLLM_MAX_COMPLETION_PROMPTS VLLM_MAX_NUM_BAD_WORDS VLLM_MAX_N_SEQUENCES
            VLLM_MAX_STOP_STRINGS VLLM_SKIP_MODEL_NAME_VALIDATION
            VLLM_SYSTEM_START_DATE VLLM_TOOL_JSON_ERROR_AUTOMATIC_RETRY
            VLLM_USE_EXPERIMENTAL_PARSER_CONTEXT VLLM_USE_FASTOKENS VLLM_USE_FLASHINFER_SAMPLER
            VLLM_USE_RUST_BENCH VLLM_V1_OUTPUT_PROC_CHUNK_SIZE
            VLLM_XPU_USE_SAMPLER_KERNEL
            """,
            # Processes, ranks and their addresses. The number of ranks has a field of its own.
            """
            VLLM_ALLOW_INSECURE_SERIALIZATION VLLM_DP_MASTER_IP VLLM_DP_MASTER_PORT VLLM_DP_RANK
            VLLM_DP_RANK_LOCAL VLLM_DP_SIZE VLLM_EC_SIDE_CHANNEL_HOST VLLM_EC_SIDE_CHANNEL_PORT
            VLLM_ELASTIC_EP_DRAIN_REQUESTS VLLM_ELASTIC_EP_SCALE_UP_LAUNCH
            VLLM_ENABLE_V1_MULTIPROCESSING VLLM_HOST_IP VLLM_LOOPBACK_IP VLLM_MQ_MAX_CHUNK_BYTES_MB
            VLLM_MSGPACK_ZERO_COPY_THRESHOLD VLLM_NIXL_SIDE_CHANNEL_HOST VLLM_NIXL_SIDE_CHANNEL_PORT
            VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME VLLM_P2P_MAX_PEERS VLLM_P2P_SIDE_CHANNEL_HOST
            VLLM_P2P_SIDE_CHANNEL_PORT VLLM_PORT VLLM_RANDOMIZE_DP_DUMMY_INPUTS
            VLLM_RAY_BUNDLE_INDICES VLLM_RAY_DP_PACK_STRATEGY VLLM_RAY_DP_PLACEMENT_NODE_IPS
            VLLM_RAY_EXTRA_ENV_VARS_TO_COPY VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY
            VLLM_RAY_PER_WORKER_GPUS VLLM_USE_RAY_COMPILED_DAG_CHANNEL_TYPE
            VLLM_USE_RAY_COMPILED_DAG_OVERLAP_COMM VLLM_USE_RAY_V2_EXECUTOR_BACKEND
            VLLM_USE_RAY_WRAPPED_PP_COMM VLLM_USE_SPINLOOP_EXT VLLM_WORKER_MULTIPROC_METHOD
            """,
            # Memory, stores and connectors.
            """
            MOONCAKE_PREFERRED_SEGMENT MOONCAKE_REQUESTER_LOCAL_HOSTNAME S3_ACCESS_KEY_ID
            S3_ENDPOINT_URL S3_SECRET_ACCESS_KEY VLLM_ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN
            VLLM_CPU_KVCACHE_SPACE VLLM_ENABLE_CUDAGRAPH_GC VLLM_FASTSAFETENSORS_QUEUE_SIZE
            VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES VLLM_KV_OFFLOAD_MAX_BATCH_DESCRIPTORS
            VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS VLLM_MOONCAKE_BOOTSTRAP_PORT
            VLLM_MOONCAKE_DISK_STAGING_USABLE_RATIO VLLM_MOONCAKE_LOAD_RECV_THREADS
            VLLM_ROCM_SLEEP_MEM_CHUNK_SIZE VLLM_USE_SIMPLE_KV_OFFLOAD
            VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY VLLM_WEIGHT_OFFLOADING_DISABLE_UVA
            VLLM_WSL2_ENABLE_PIN_MEMORY
            """,
        )
    ).split()
)
# Enough to see in a message which variables differ.
_MAX_TEXT: Final = 500


def variables() -> str:
    """Return the variables that are set and may shape blocks: names, and one digest of the values.

    A value may be long, or a secret of which only a later vLLM knows. It may also name a file.

    Raises:
        ConfigError: a file that one names cannot be read.
    """
    names = sorted(({*envs.environment_variables, *_UNLISTED} - _NOT_COUNTED) & {*os.environ})
    if not names:
        return ""
    values = digest_of([(name, os.environ[name], _content(name)) for name in names])
    return f"{' '.join(names)[:_MAX_TEXT]} {values}"


def _content(name: str) -> bytes | None:
    """Return the content of the file that a variable names; None if it names none."""
    value = os.environ[name]
    # A switch names none, also where a shell has made a file of its name, as `2>1` does.
    is_file = not value.isdigit() and os.path.isfile(value)
    return content_named(name, value) if is_file else None
