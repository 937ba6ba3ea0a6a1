package controller

import (
	"fmt"
	"testing"
	"time"
)

// BenchmarkVolumes makes and deletes volumes, warm, and counts requests and sessions: what scope costs the controller.
func BenchmarkVolumes(b *testing.B) {
	for _, c := range []struct{ name, scope string }{{"", ""}, {"-scoped", ""}, {"-scoped-required", "required"}} {
		for i, target := range targets {
			if c.name != "" {
				target = scoped[i]
			}
			b.Run(target.name+c.name, func(b *testing.B) {
				if target.skip != "" {
					b.Skip(target.skip)
				}
				e := newEnv(b, target)
				p := e.process()
				pairs := []string{"scope", c.scope}
				p.delete(p.create("warm", pairs...))
				p.hooks.reset()
				before, made, requests := len(p.sessions.made()), time.Duration(0), 0
				b.ResetTimer()
				for n := range b.N {
					began := time.Now()
					id := p.create(fmt.Sprint("v-", n), pairs...)
					made += time.Since(began)
					requests += len(p.hooks.sent())
					p.delete(id)
					p.hooks.reset()
				}
				b.ReportMetric(float64(made.Microseconds())/float64(b.N)/1000, "ms/create")
				b.ReportMetric((float64(b.Elapsed().Microseconds())-float64(made.Microseconds()))/float64(b.N)/1000, "ms/delete")
				b.ReportMetric(float64(requests)/float64(b.N), "requests/create")
				b.ReportMetric(float64(len(p.sessions.made())-before)/float64(b.N), "sessions/op")
			})
		}
	}
}
