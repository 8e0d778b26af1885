package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"time"
)

// decisions are how often a program decided for each reason, up to a moment.
type decisions struct {
	at     time.Time
	counts map[string]float64
}

// readDecisions asks the debug page of a program for the counters of pgsplit.Stats. It looks at nothing else of the page,
// and takes their names in any case. The error does not quote the address, which can hold a password.
func readDecisions(ctx context.Context, page string) (decisions, error) {
	address, err := url.Parse(page)
	if err != nil || address.Host == "" {
		return decisions{}, errors.New("the debug page's address is not a URL")
	}
	query := address.Query()
	query.Set("format", "json")
	address.RawQuery = query.Encode()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, address.String(), nil)
	if err != nil {
		return decisions{}, errors.New("the debug page's address is not a URL")
	}
	request.Header.Set("Accept", "application/json")
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		text, _, _ := cause(err)
		return decisions{}, errors.New(text)
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return decisions{}, fmt.Errorf("it answers %d", response.StatusCode)
	}
	var body struct {
		Stats struct {
			Reasons map[string]float64 `json:"reasons"`
		} `json:"stats"`
	}
	const longest = 4 << 20
	if err := json.NewDecoder(io.LimitReader(response.Body, longest)).Decode(&body); err != nil || body.Stats.Reasons == nil {
		return decisions{}, errors.New("it has no stats.reasons in JSON")
	}
	return decisions{time.Now(), body.Stats.Reasons}, nil
}

// since returns the decisions per second since an earlier look. A program that was started again began at zero.
func (d decisions) since(earlier decisions) map[string]float64 {
	rates := map[string]float64{}
	seconds := d.at.Sub(earlier.at).Seconds()
	if seconds <= 0 {
		return rates
	}
	for reason, n := range d.counts {
		if before := earlier.counts[reason]; before <= n {
			n -= before
		}
		rates[reason] = n / seconds
	}
	return rates
}
