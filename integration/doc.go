// Package integration holds tests of pgsplit that need more than the driver does: other libraries that people use on
// top of it or in front of it, and Docker. It is a module of its own, so that none of that becomes a dependency of pgsplit.
//
// Every test asks for a cluster, a primary with streaming replicas, and does not know who runs it. PGSPLIT_TEST_BACKEND
// says who does:
//
//   - unset or "binaries": package pgsplittest, from the PostgreSQL programs on this machine
//   - "docker": a Docker engine, through testcontainers, with the image that PGSPLIT_TEST_IMAGE names (default
//     postgres:18; one of the official images since version 14). Where no engine answers, the tests fail and say so.
//
// With -short no test runs, since each needs a cluster.
package integration
