"""The engine profiles: facts about each engine with the version they hold for; profiles.py explains the fields.

Read in November 2026: vLLM 0.32.0, llama.cpp of llama-cpp-python 0.3.36 and speculators 0.9.0 in their own sources,
SGLang's models of the same month, TensorRT-LLM 1.3, OpenVINO GenAI 2026.4 and MNN 3.6.1 in their manuals and exporters,
transformers 5.23. "tried" means that the engine ran one of our checkpoints and gave our own loop's tokens.
"""

from __future__ import annotations

from components.publish.profiles import GIVEN_MODEL, NORM_FLAGS, OWN_MTP, FewBits, Need, Profile, Served

NO_TREE_OF_OURS = "its heads are transformer layers on the target's last state, which no engine has a reader for"
IN_OUR_LOOP = "no public engine takes its n-grams from a Jacobi window in the verifying pass"
OWN_MODULE_ONLY = "it reads modules of the target's own architecture: say settings: {mtp: {start: own}}"
NEEDS_NO_FILE = Served()
MARLIN = (0, 32, 64, 128)
"""Group sizes of the kernels for NVIDIA GPUs that vLLM and SGLang share."""

VLLM = Profile(
    title="vLLM",
    version="0.32.0",
    methods={
        "eagle3": Served(("eagle3", "speculators"), tried="0.32.0"),
        "p-eagle": Served(("speculators",), tried="0.32.0"),
        "eagle1": Served(
            ("eagle1",),
            needs=(Need("fc_bias", (False,), "has no bias in fc and passes over ours without a word"),),
            tried="0.32.0",
        ),
        "hass": Served(
            ("eagle1",), needs=(Need("fc_bias", (False,), "has no bias in fc and passes over ours without a word"),)
        ),
        "medusa": Served(("medusa",), tried="0.32.0"),
        "mtp": Served(
            ("mimo",),
            needs=(
                Need("mtp_modules", (1,), "serves one new module, in the shape of MiMo's"),
                Need("first_hidden", ("post_norm",), "feeds modules the state after the final norm"),
                Need("intermediate_size", (0,), "reads every size of the module in the target's config"),
            ),
            tried="0.32.0",
            max_depth=1,
            # mimo_mtp.py builds a Qwen2DecoderLayer of the target's config; qwen2.py hands its rope_parameters on.
            rope_of_target=True,
        ),
        OWN_MTP: Served(("stitched",), tried="0.32.0"),
        "draft-model": Served(("causal-lm",), tried="0.32.0"),
        GIVEN_MODEL: NEEDS_NO_FILE,
        "ngram": Served(tried="0.32.0"),
    },
    unsupported={"lookahead": IN_OUR_LOOP, "mtp-parallel": NO_TREE_OF_OURS},
    norm_flags=frozenset(NORM_FLAGS),
    taps_at=("top", "inner as inputs"),
    whole_d2t=False,
    few_bits=FewBits(
        ("eagle3", "draft-model"),
        {"int8": MARLIN, "int4": MARLIN},
        unquantised={
            "draft-model": ("lm_head",)
        },  # its format has a row for every token, which are others than were measured
        may_keep=("fc", "lm_head"),
        remarks={
            "int4": "vLLM takes int4 by its source on GPUs; on a CPU in --dtype bfloat16 or float16, not in float32",
            "int8": "vLLM takes int8 by its source on GPUs; its CPU build refused ours, with kernels for 4 bits alone",
        },
    ),
    architectures=(
        "LlamaForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
        "Qwen3NextForCausalLM",
        "Qwen3_5ForCausalLM",
        "Qwen3_5MoeForCausalLM",
        "DeepseekV2ForCausalLM",
        "DeepseekV3ForCausalLM",
        "MistralForCausalLM",
        "GptOssForCausalLM",
        "GraniteForCausalLM",
        "MiniMaxM2ForCausalLM",
        "MiniCPMForCausalLM",
        "ApertusForCausalLM",
        "Phi3ForCausalLM",
        "LLaMAForCausalLM",
        "InternLM3ForCausalLM",
        "Ministral3ForCausalLM",
        "Ernie4_5ForCausalLM",
        "Gemma4ForCausalLM",
        "NemotronHForCausalLM",
        "MiniCPM3ForCausalLM",
        "Step1ForCausalLM",
        "GraniteSWAForCausalLM",
        "Plamo3ForCausalLM",
        "AfmoeForCausalLM",
        "DeepseekForCausalLM",
        "Llama4ForCausalLM",
        # Not MiMoForCausalLM: it says that it can be tapped, and its own forward pass collects nothing.
    ),
)

SGLANG = Profile(
    title="SGLang",
    version="read November 2026",
    methods={
        "eagle3": Served(("eagle3",)),
        "eagle1": Served(("eagle1",)),
        "hass": Served(("eagle1",)),
        OWN_MTP: Served(("stitched",)),
        "draft-model": Served(("causal-lm",)),
        GIVEN_MODEL: NEEDS_NO_FILE,
        "ngram": NEEDS_NO_FILE,
    },
    unsupported={
        "p-eagle": "its further layers have other names, and it drafts a token at a time",
        "medusa": "it has no Medusa",
        "mtp": OWN_MODULE_ONLY,
        "lookahead": IN_OUR_LOOP,
        "mtp-parallel": NO_TREE_OF_OURS,
    },
    taps_at=("inner",),
    max_layers=1,
    few_bits=FewBits(
        ("eagle3", "draft-model"),
        {"int8": MARLIN, "int4": MARLIN},
        unquantised={"eagle3": ("fc", "lm_head"), "draft-model": ("lm_head",)},
        remarks=dict.fromkeys(("int8", "int4"), "SGLang takes compressed-tensors by its source; it was not run"),
    ),
)

LLAMA_CPP = Profile(
    title="llama.cpp",
    version="of llama-cpp-python 0.3.36",
    methods={
        "eagle3": Served(("gguf",), tried="0.3.36"),
        OWN_MTP: Served(("stitched",)),
        "draft-model": Served(("gguf",)),
        GIVEN_MODEL: NEEDS_NO_FILE,
        "ngram": NEEDS_NO_FILE,
    },
    unsupported={
        "p-eagle": "its converter takes EAGLE drafters of one layer and three taps",
        "eagle1": "it reads EAGLE-3 only",
        "hass": "it reads EAGLE-3 only",
        "medusa": "it has no Medusa",
        "mtp": OWN_MODULE_ONLY,
        "lookahead": "its example program has one of its own; the server has none",
        "mtp-parallel": NO_TREE_OF_OURS,
    },
    norm_flags=frozenset({"norm_before_fc", "norm_before_residual"}),
    taps_at=("top",),
    max_layers=1,
    # Its converter makes Q8_0 of every matrix; 4-bit files come of llama-quantize, which no release calls.
    few_bits=FewBits(
        ("eagle3",),
        {"int8": (32,)},
        remarks={"int8": "llama.cpp holds int8 as Q8_0, bit for bit; it rounds activations too: some rounds differ"},
    ),
    # Its graphs that keep each layer's input (t_layer_inp); those of Qwen2, Granite and Phi-3 do not.
    architectures=(
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
        "Qwen3NextForCausalLM",
        "Qwen3_5ForCausalLM",
        "Qwen3_5MoeForCausalLM",
        "GptOssForCausalLM",
        "MixtralForCausalLM",
        "Gemma4ForCausalLM",
        "MiniMaxM2ForCausalLM",
        "NemotronHForCausalLM",
    ),
)

MNN = Profile(
    title="MNN",
    version="3.6.1",
    methods={
        "eagle3": Served(("eagle3",)),
        "draft-model": Served(("causal-lm",)),
        GIVEN_MODEL: NEEDS_NO_FILE,
        "ngram": NEEDS_NO_FILE,
    },
    unsupported={
        "p-eagle": "its exporter takes EAGLE drafters of one layer",
        "eagle1": "it reads EAGLE-3 only",
        "hass": "it reads EAGLE-3 only",
        "medusa": "it has no Medusa",
        "mtp": "it reads MiMo's own modules only",
        OWN_MTP: "it reads MiMo's own modules only",
        "lookahead": "what it calls lookahead is prompt lookup, our ngram",
        "mtp-parallel": NO_TREE_OF_OURS,
    },
    taps_at=(),
    fixed_rope_theta=10000.0,  # and no scaling
    heads_from="target",
    max_layers=1,
)

TENSORRT_LLM = Profile(
    title="TensorRT-LLM",
    version="1.3, PyTorch backend",
    methods={
        "eagle3": Served(("eagle3",)),
        OWN_MTP: Served(("stitched",)),
        "draft-model": Served(("causal-lm",)),
        GIVEN_MODEL: NEEDS_NO_FILE,
        "ngram": NEEDS_NO_FILE,
    },
    unsupported={
        "eagle1": "its PyTorch backend has EAGLE-3 only",
        "hass": "its PyTorch backend has EAGLE-3 only",
        "medusa": "its PyTorch backend has none, engines built ahead only",
        "mtp": OWN_MODULE_ONLY,
        "lookahead": "its PyTorch backend has none, engines built ahead only",
        "mtp-parallel": NO_TREE_OF_OURS,
    },
    max_layers=1,
)

TRANSFORMERS = Profile(
    title="transformers",
    version="5.23",
    methods={
        OWN_MTP: Served(
            ("stitched",), tried="5.23.0", max_depth=1, architectures=("Glm4MoeForCausalLM", "DeepseekV3ForCausalLM")
        ),
        "draft-model": Served(("causal-lm",)),
        GIVEN_MODEL: NEEDS_NO_FILE,
        "ngram": NEEDS_NO_FILE,
    },
    unsupported={
        "eagle3": "its generate has no EAGLE",
        "eagle1": "its generate has no EAGLE",
        "hass": "its generate has no EAGLE",
        "p-eagle": "its generate has no EAGLE",
        "medusa": "its generate has no Medusa",
        "mtp": OWN_MODULE_ONLY,
        "lookahead": IN_OUR_LOOP,
        "mtp-parallel": NO_TREE_OF_OURS,
    },
)

OPENVINO = Profile(
    title="OpenVINO GenAI",
    version="2026.4.1",
    methods={
        "eagle3": Served(("eagle3",)),
        "draft-model": Served(("causal-lm",)),
        GIVEN_MODEL: NEEDS_NO_FILE,
        "ngram": NEEDS_NO_FILE,
    },
    unsupported={
        "eagle1": "it reads EAGLE-3 only",
        "hass": "it reads EAGLE-3 only",
        "p-eagle": "it drafts a token at a time",
        "medusa": "it has no Medusa",
        "mtp": "it reads no MTP modules",
        OWN_MTP: "it reads no MTP modules",
        "lookahead": IN_OUR_LOOP,
        "mtp-parallel": NO_TREE_OF_OURS,
    },
    max_layers=1,
)

SPECULATORS = Profile(
    title="speculators",
    version="0.9.0",
    methods={
        # Its converter also takes midlayer.*, and leaves the embedding random where the file brings none.
        "eagle3": Served(("speculators",), tried="0.9.0"),
        "p-eagle": Served(("speculators",)),
    },
    unsupported={
        "eagle1": "it reads EAGLE-3 and P-EAGLE",
        "hass": "it reads EAGLE-3 and P-EAGLE",
        "medusa": "it has no Medusa",
        "mtp": OWN_MODULE_ONLY,
        "draft-model": "any engine serves a draft model as it is",
        "lookahead": IN_OUR_LOOP,
        "mtp-parallel": NO_TREE_OF_OURS,
    },
    norm_flags=frozenset(NORM_FLAGS),
    taps_at=("top",),
)

PROFILES: dict[str, Profile] = {
    "vllm": VLLM,
    "sglang": SGLANG,
    "llama.cpp": LLAMA_CPP,
    "mnn": MNN,
    "tensorrt-llm": TENSORRT_LLM,
    "transformers": TRANSFORMERS,
    "openvino": OPENVINO,
    "speculators": SPECULATORS,
}
