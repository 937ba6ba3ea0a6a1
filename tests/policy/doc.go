// Package policy is the proof that a session reaches no further than its scope: what pkg/policy writes, given to security
// token services that enforce policies, and every kind of call tried with the sessions that they make.
package policy
