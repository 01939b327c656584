# The front door. Every target installs what it needs and can be run on a fresh Debian 12 with
# Rust 1.88 or newer. The tests of the JetStream store (in test and crash) need Go 1.21 or newer, too,
# and are left out, with a line that says so, where there is none.
#
#   make demo     the main job: a real guest, killed, recovered, judged          ACCEL=kvm|tcg forces
#   make test     everything that CI runs
#   make lint     formatting and clippy alone
#   make doc      the crates' own pages: target/doc/amberlog/index.html
#   make unused   dependencies that nothing needs (cargo-machete)
#   make mutate   small changes of what differs from BASE (origin/main), which some test must see (cargo-mutants)
#   make bench    the figures of docs/results/benchmarks.md; its last part takes hours, DURABLE_ROUNDS=1 does not
#   make crash    the long crash rounds, upgrades, many VMs
#   make stress   kills while the host's memory management works against guests, best as root       HOURS=N LOG=FILE UNDER=PLACEMENT KILLS=N
#   make nemesis  harm to a journal server's files and network, ROUNDS of it
#   make variety  guests of every kind, killed and judged       CASES=PATTERN ROUNDS=N SEED=N MINUTES=N PLACEMENT=P KILLS=N
#   make mutants  seeded faults that some test must catch; RECORD=FILE to go on with what an earlier call did not come to, or what has changed since, JOBS=N side by side
#   make install  what was built for release, below PREFIX (/usr/local)          PREFIX=DIR DESTDIR=DIR
#   make packages-deb       Debian packages, in build/packages
#   make packages-test      those: lintian, and installed, upgraded, removed and purged in a Debian of its own, at last with its systemd and under guests
#
# Guests run under KVM where one boots, else emulated. AMBERLOG_GUEST_KERNEL=FILE boots them from another kernel, a bzImage or an
# uncompressed vmlinux with all built in (and AMBERLOG_GUEST_CPU, AMBERLOG_GUEST_BIOS are QEMU's -cpu and -bios with it).

export ACCEL
# rustup puts cargo here, and sudo or a fresh shell may not have it on PATH.
export PATH := $(PATH):$(HOME)/.cargo/bin

PHASE := scripts/phase.sh

.PHONY: demo test lint doc unused mutate bench bench-durable crash stress nemesis variety mutants packages nats-server release install packages-deb packages-test clean

demo: packages
	@$(PHASE) "release build" cargo build --release --workspace
	@cargo run --release --quiet -p guest-kit --bin demo

# Tests run unoptimised enough to keep overflow checks and assertions, and find the programs they
# start (amberlog, its shim) beside themselves: hence the build of the whole workspace first.
# Tests with guests wait more than they compute: more of them at once than there are processors.
test: packages lint nats-server
	@$(PHASE) "build" cargo build --workspace
	@$(PHASE) "tests" env RUST_TEST_THREADS=$(or $(RUST_TEST_THREADS),4) scripts/run-tests.sh

lint:
	@$(PHASE) "formatting" cargo fmt --all -- --check
	@$(PHASE) "clippy" cargo clippy --workspace --all-targets -- -D warnings

# The pages open on the crate that tells of all the others.
doc:
	@$(PHASE) "pages of the crates" env RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps
	@echo '<meta http-equiv="refresh" content="0; url=amberlog/index.html">' > target/doc/index.html

unused:
	@command -v cargo-machete > /dev/null || $(PHASE) "cargo-machete" cargo install --locked cargo-machete
	@$(PHASE) "unused dependencies" cargo machete

# Beside `make mutants`, whose faults are chosen: these are small, many, and come from the difference alone.
mutate:
	@command -v cargo-mutants > /dev/null || $(PHASE) "cargo-mutants" cargo install --locked cargo-mutants
	@git diff $(or $(BASE),origin/main)... > target/mutate.diff
	@$(PHASE) "mutations of what differs from $(or $(BASE),origin/main)" cargo mutants --in-diff target/mutate.diff --no-shuffle --jobs 1

packages:
	@$(PHASE) "packages" scripts/install-packages.sh

# For the tests of the JetStream store; says so and goes on where there is no Go, but not in CI.
nats-server:
	@$(PHASE) "nats-server" scripts/fetch-nats-server.sh

# The durable part goes on where it was; what is before it begins anew.
bench: packages
	@$(PHASE) "release build" cargo build --release --workspace
	@cargo run --release --quiet -p guest-kit --bin bench -- --json target/bench-$(BENCH_COMMIT).json; bench=$$?; \
		$(MAKE) bench-durable && exit $$bench

# A contender that fails leaves the other drive to be measured.
bench-durable: packages
	@$(PHASE) "release build" cargo build --release --workspace
	@failed=0; for flush_us in 2000 0; do \
		$(PHASE) "durability by age beside QEMU's caches, a flush of $$flush_us us" target/release/amberlog-lab shoot-out --no-deaths --iterations 3 \
			--contenders $(DURABLE_CONTENDERS) --rounds $(DURABLE_ROUNDS) --flush-us $$flush_us --images /dev/shm --out target/bench-durable-$(BENCH_COMMIT)-$$flush_us || failed=1; \
	done; exit $$failed

# Cells of another program are not written over.
BENCH_COMMIT = $(or $(shell git describe --always --dirty 2>/dev/null),release)

# Both modes of ext4's journal under QEMU's own disks, and under each age. On the medium `qemu-writeback` is `qemu-none`, so it is on the file behind it, in the host's page cache.
DURABLE_CONTENDERS := qemu-none,qemu-none-journal,qemu-none-journal-iothread,qemu-writeback-cached,qemu-writeback-journal-cached,qemu-unsafe,qemu-unsafe-journal,qemu-unsafe-journal-cached,retain,retain-5,retain-5-ordered,retain-0,retain-0-ordered

# So that every load lasts three ages of five seconds and more under the fastest of them; the slowest take many minutes for it, and all of them some nine hours. `DURABLE_ROUNDS=1` is a short look.
DURABLE_ROUNDS ?= 16,sqlite=4,sqlite_wal=10,append=20,overwrite=26,untar=26,postmark=12

crash: packages nats-server
	@$(PHASE) "release build" cargo build --release --workspace
	@$(PHASE) "kills under QEMU's own disks" cargo run --release --quiet -p guest-kit --bin crash-rounds -- --rounds 5
	@$(PHASE) "kills under amberlog" cargo run --release --quiet -p guest-kit --bin crash-rounds -- --rounds 50 --under retain
	@$(PHASE) "kills of the process that serves a guest, which goes on" cargo run --release --quiet -p guest-kit --bin crash-rounds -- --rounds 25 --under any --worker-kills 40
	@$(PHASE) "the same with a journal on a server" cargo run --release --quiet -p guest-kit --bin crash-rounds -- --rounds 5 --under remote --worker-kills 40
	@$(PHASE) "the same under durability by age" cargo run --release --quiet -p guest-kit --bin crash-rounds -- --rounds 8 --under durable --worker-kills 40
	@$(PHASE) "the same with a journal on NVM" cargo run --release --quiet -p guest-kit --bin crash-rounds -- --rounds 8 --under nvm --worker-kills 40
	@$(PHASE) "the same with memory under stress" cargo run --release --quiet -p guest-kit --bin crash-rounds -- --rounds 8 --under retain --worker-kills 10 --memory-stress all
	@$(PHASE) "kills of supervisors amid that, where a manager keeps descriptors" env AMBERLOG_ROUNDS=40 cargo test --release --quiet -p amberlog --test guests -- supervisor::a_guest_goes_on_in_a_storm --nocapture
	@$(PHASE) "a file system that grows, durable by age" cargo test --release --quiet -p amberlog --test guests -- durable_live::a_file_system_that_grows --ignored --nocapture
	@$(PHASE) "a real systemd that starts its daemon again" cargo test --release --quiet -p amberlog --test guests -- systemd:: --ignored --nocapture
	@$(PHASE) "upgrades back and forth" env AMBERLOG_ROUNDS=100 cargo test --release --quiet -p amberlog --test guests -- worker::a_guest_goes_on_over_many_upgrades --nocapture
	@$(PHASE) "200 VMs on one host" env AMBERLOG_VMS=200 cargo test --release --quiet -p amberlog --test crowd -- --nocapture
	@$(PHASE) "remote journals of real guests" env AMBERLOG_ROUNDS=3 cargo test --release --quiet -p amberlog --test guests -- remote:: --include-ignored --test-threads 1
	@$(PHASE) "remote journals, a model" env AMBERLOG_REMOTE_SEEDS=500 cargo test --release --quiet -p placement --lib -- remote::
	@$(PHASE) "servers of a replicated remote journal" cargo test --release --quiet -p remote-journal --test jetstream -- --ignored --test-threads 3
	@$(PHASE) "crash explorer" cargo run --release --quiet -p crash-explorer -- explore --points 20000
	@$(PHASE) "placement nvm, a model" env AMBERLOG_NVM_MODEL_SEEDS=90..3000 cargo test --release --quiet -p placement --test nvm_model
	@$(PHASE) "power failures and durability by age" cargo run --release --quiet -p crash-explorer -- explore --power --points 100000
	@$(PHASE) "power failures and durable-within, as a disk has it" cargo run --release --quiet -p crash-explorer -- explore --aged --points 100000
	@$(PHASE) "power failures and durability by age, in a model" env AMBERLOG_ROUNDS=2000 cargo test --release --quiet -p durability
	@$(PHASE) "power failures under placement nvm" cargo run --release --quiet -p crash-explorer -- explore --nvm --points 100000
	@$(PHASE) "power failures of NVM" env AMBERLOG_NVM_POINTS=200000 cargo test --release --quiet -p nvm-journal --test crash -- --nocapture

# Hours of it find what minutes do not: the same command goes on where it was interrupted, until there were so many.
stress: packages
	@$(PHASE) "release build" cargo build --release --workspace
	@$(PHASE) "kills with memory under stress" cargo run --release --quiet -p guest-kit --bin crash-rounds -- --memory-stress all \
		--hours $(or $(HOURS),1) --under $(or $(UNDER),retain) --worker-kills $(or $(KILLS),10) --log $(or $(LOG),target/stress-rounds.jsonl)

nemesis: packages
	@$(PHASE) "journal server under a nemesis" env AMBERLOG_NEMESIS_ROUNDS=$(or $(ROUNDS),200) cargo test --release --quiet -p journal-server --test nemesis -- --nocapture

variety: packages
	@$(PHASE) "release build" cargo build --release --workspace
	@$(PHASE) "a variety of guests" cargo run --release --quiet -p guest-kit --bin variety -- \
		$(if $(CASES),--cases '$(CASES)') $(if $(ROUNDS),--rounds $(ROUNDS)) $(if $(SEED),--seed $(SEED)) \
		$(if $(MINUTES),--minutes $(MINUTES)) $(if $(PLACEMENT),--placement $(PLACEMENT)) \
		$(if $(KILLS),--worker-kills $(KILLS))

mutants: packages
	@$(PHASE) "mutants" cargo run --release --quiet -p crash-explorer --bin mutants -- \
		$(if $(RECORD),--record $(RECORD)) $(if $(JOBS),--jobs $(JOBS))

PREFIX ?= /usr/local

# What is installed; not the whole workspace.
release:
	@$(PHASE) "release build" cargo build --release -p amberlog -p vmm-shim -p lab -p journal-server

install: release
	@packaging/install.sh target/release $(PREFIX) $(DESTDIR)

packages-deb: packages release
	@$(PHASE) "Debian packages" packaging/build-deb.sh target/release build/packages

packages-test: packages-deb
	@$(PHASE) "what tries them" cargo build --release --quiet -p guest-kit --bin packaged
	@$(PHASE) "packages, tried" packaging/test-packages.sh target/release build/packages

clean:
	rm -rf build target
