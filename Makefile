# The front door. Every target installs what it needs and can be run on a fresh Debian 12 with a
# Rust toolchain.
#
#   make demo     the main job: a real guest, killed, recovered, judged          ACCEL=kvm|tcg forces
#   make test     everything that CI runs
#   make lint     formatting and clippy alone
#   make bench    the figures of docs/results/benchmarks.md
#   make crash    the long crash rounds
#   make nemesis  harm to a journal server's files and network, ROUNDS of it
#   make variety  guests of every kind, killed and judged       CASES=PATTERN ROUNDS=N SEED=N MINUTES=N PLACEMENT=P
#   make mutants  seeded faults that some test must catch
#
# Guests run under KVM where one boots, else emulated. AMBERLOG_GUEST_KERNEL=FILE boots them from another kernel, a bzImage or an
# uncompressed vmlinux with all built in (and AMBERLOG_GUEST_CPU, AMBERLOG_GUEST_BIOS are QEMU's -cpu and -bios with it).

export ACCEL
# rustup puts cargo here, and sudo or a fresh shell may not have it on PATH.
export PATH := $(PATH):$(HOME)/.cargo/bin

PHASE := scripts/phase.sh

.PHONY: demo test lint bench crash nemesis variety mutants packages nats-server clean

demo: packages
	@$(PHASE) "release build" cargo build --release --workspace
	@cargo run --release --quiet -p guest-kit --bin demo

# Tests run unoptimised enough to keep overflow checks and assertions, and find the programs they
# start (amberlog, its shim) beside themselves: hence the build of the whole workspace first.
test: packages lint nats-server
	@$(PHASE) "build" cargo build --workspace
	@$(PHASE) "tests" cargo test --workspace

lint:
	@$(PHASE) "formatting" cargo fmt --all -- --check
	@$(PHASE) "clippy" cargo clippy --workspace --all-targets -- -D warnings

packages:
	@$(PHASE) "packages" scripts/install-packages.sh

# For the tests of the JetStream store; says so and goes on where there is no Go, but not in CI.
nats-server:
	@$(PHASE) "nats-server" scripts/fetch-nats-server.sh

bench: packages
	@$(PHASE) "release build" cargo build --release --workspace
	@cargo run --release --quiet -p guest-kit --bin bench

crash: packages nats-server
	@$(PHASE) "release build" cargo build --release --workspace
	@$(PHASE) "kills under QEMU's own disks" cargo run --release --quiet -p guest-kit --bin crash-rounds -- --rounds 5
	@$(PHASE) "kills under amberlog" cargo run --release --quiet -p guest-kit --bin crash-rounds -- --rounds 50 --under retain
	@$(PHASE) "remote journals of real guests" env AMBERLOG_ROUNDS=3 cargo test --release --quiet -p amberlog --test guests -- remote:: --include-ignored --test-threads 1
	@$(PHASE) "remote journals, a model" env AMBERLOG_REMOTE_SEEDS=500 cargo test --release --quiet -p placement --lib -- remote::
	@$(PHASE) "servers of a replicated remote journal" cargo test --release --quiet -p remote-journal --test jetstream -- --ignored --test-threads 3
	@$(PHASE) "crash explorer" cargo run --release --quiet -p crash-explorer -- explore --points 20000
	@$(PHASE) "placement nvm, a model" env AMBERLOG_NVM_MODEL_SEEDS=90..3000 cargo test --release --quiet -p placement --test nvm_model
	@$(PHASE) "power failures and durability by age" cargo run --release --quiet -p crash-explorer -- explore --power --points 100000
	@$(PHASE) "power failures and durability by age, in a model" env AMBERLOG_ROUNDS=2000 cargo test --release --quiet -p durability
	@$(PHASE) "power failures under placement nvm" cargo run --release --quiet -p crash-explorer -- explore --nvm --points 100000
	@$(PHASE) "power failures of NVM" env AMBERLOG_NVM_POINTS=200000 cargo test --release --quiet -p nvm-journal --test crash -- --nocapture

nemesis: packages
	@$(PHASE) "journal server under a nemesis" env AMBERLOG_NEMESIS_ROUNDS=$(or $(ROUNDS),200) cargo test --release --quiet -p journal-server --test nemesis -- --nocapture

variety: packages
	@$(PHASE) "release build" cargo build --release --workspace
	@$(PHASE) "a variety of guests" cargo run --release --quiet -p guest-kit --bin variety -- \
		$(if $(CASES),--cases '$(CASES)') $(if $(ROUNDS),--rounds $(ROUNDS)) $(if $(SEED),--seed $(SEED)) \
		$(if $(MINUTES),--minutes $(MINUTES)) $(if $(PLACEMENT),--placement $(PLACEMENT))

mutants: packages
	@$(PHASE) "mutants" cargo run --release --quiet -p crash-explorer --bin mutants

clean:
	rm -rf build target
