# make test and make demo need Go, and on Linux a C compiler for the race detector. PostgreSQL's programs are found, or
# fetched where there are none: see scripts/postgres-bin, which says what it does.

SHELL := /bin/bash

# Arguments for the demo, as in: make demo DEMO_ARGS='--once'
DEMO_ARGS ?=
# Which benchmarks, how often, and for how long or how many rounds (50x).
BENCH ?= .
BENCH_COUNT ?= 1
BENCH_TIME ?= 1s
# How long each fuzz target runs.
FUZZTIME ?= 10s
export FUZZTIME

# How long a soak takes, and the seed of its schedule: another one each time, unless it is given.
SECONDS ?= 60
SEED ?=

.PHONY: help test test-short lint vet tidy-check fuzz bench soak demo

help: ## this list
	@grep -E '^[a-z-]+:.*##' Makefile | sed -e 's/:.*##/:/' | while IFS=: read -r target text; do printf 'make %-11s%s\n' "$$target" "$$text"; done

test: ## everything: lint, tests against real clusters under the race detector, fuzzing, the demo once
	@scripts/test

test-short: ## the tests that need no PostgreSQL server and no C compiler
	@for module in $$(scripts/modules); do (cd "$$module" && GOWORK=off go test -short -timeout 20m ./...) || exit 1; done

lint: ## gofmt, go mod tidy, go vet, staticcheck
	@scripts/lint

vet: ## go vet alone
	@for module in $$(scripts/modules); do (cd "$$module" && GOWORK=off go vet ./...) || exit 1; done

tidy-check: ## whether go.mod and go.sum of each module say what its source imports
	@for module in $$(scripts/modules); do (cd "$$module" && GOWORK=off go mod tidy -diff) || exit 1; done

fuzz: ## each fuzz target for FUZZTIME (10s)
	@scripts/fuzz

bench: ## benchmarks (BENCH=regexp BENCH_COUNT=n BENCH_TIME=1s)
	@bin=$$(scripts/postgres-bin) && for module in $$(scripts/modules); do (cd "$$module" && \
		PGSPLIT_PG_BIN=$$bin GOWORK=off go test -run '^$$' -bench '$(BENCH)' -benchmem -count $(BENCH_COUNT) -benchtime '$(BENCH_TIME)' -timeout 60m ./...) || exit 1; done

soak: ## sessions, writes and reads under random faults, and a verdict (SECONDS=600 SEED=7)
	@bin=$$(scripts/postgres-bin) && cd integration && PGSPLIT_PG_BIN=$$bin PGSPLIT_SOAK_SECONDS=$(SECONDS) PGSPLIT_SOAK_SEED=$(SEED) \
		GOWORK=off go test -count=1 -timeout $$(($(SECONDS) + 600))s -run '^TestSoak$$' -v ./soak

demo: ## a primary and two replicas on this machine, and pgsplit between them (DEMO_ARGS=...)
	@if [ ! -d cmd/pgsplit ]; then echo 'make demo: this checkout has no cmd/pgsplit' >&2; exit 1; fi
	@bin=$$(scripts/postgres-bin) && dir=$$(mktemp -d) && trap 'rm -rf "$$dir"' EXIT && trap : INT && \
		GOWORK=off go build -o "$$dir/pgsplit" ./cmd/pgsplit && PGSPLIT_PG_BIN=$$bin "$$dir/pgsplit" demo $(DEMO_ARGS)
