# An index of the scripts: `just` lists them, `just NAME` runs one. https://just.systems

_default:
    @just --list --unsorted

# libtorch, once; options: --cuda, --data, --cuda-tools, --pytorch, --python-libraries
setup *OPTIONS:
    scripts/setup {{OPTIONS}}

# sets up, builds, and trains OneFlow's example on two ranks
demo:
    scripts/demo

# formatting, lints, documentation, all tests: what CI runs
test:
    scripts/test

# tests again and again under load, with random delays; just repeat 20 [-p flow-launch --test it -- signals]
repeat N *OPTIONS:
    scripts/repeat {{N}} {{OPTIONS}}

# the tests of one crate; just crate ddp [FILTER]
crate NAME *FILTER:
    CARGO_INCREMENTAL=1 cargo test --release -p flow-{{NAME}} {{FILTER}}

# formats all code
fmt:
    cargo fmt --all

# the lints of scripts/test
lint:
    cargo clippy --release --workspace --all-targets -- -D warnings

# all benches; options: --quick, --compare, --only NAME
bench *OPTIONS:
    scripts/bench {{OPTIONS}}

# everything that needs a GPU, and its benches: docs/gpu-results.md
gpu-check *OPTIONS:
    scripts/gpu-check {{OPTIONS}}

# the Python package; options: --portable, --aarch64
wheel *OPTIONS:
    scripts/wheel {{OPTIONS}}

# whether the promised Rust version compiles the workspace
msrv:
    scripts/msrv

# the tests of crates without libtorch, for aarch64 under qemu
aarch64 *OPTIONS:
    scripts/aarch64 {{OPTIONS}}

# README, docs/, rustdoc and the Python packages as a site; --check opens every page in chromium
docs *OPTIONS:
    scripts/docs {{OPTIONS}}

# docs/boxing.svg, docs/buckets.svg and docs/restart.svg, from runs
pictures *NAMES:
    scripts/pictures {{NAMES}}

# groups under Miri, with aarch64's order of memory
memory-order *OPTIONS:
    scripts/memory-order {{OPTIONS}}

# licenses and sources of all dependencies, and known holes in them (cargo install cargo-deny)
deny:
    cargo deny check

# PyTorch's own tests over flow
test-torch *OPTIONS:
    scripts/test-torch {{OPTIONS}}

# flow_torch's tests with several versions of PyTorch
torch-versions:
    scripts/torch-versions

# the tests with the newest tch and libtorch
tch-versions:
    scripts/tch-versions

# README's two commands on a system with only what README names
fresh *OPTIONS:
    scripts/fresh {{OPTIONS}}
