//go:build linux

package integration

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"html"
	"image/color"
	"image/png"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/pgsplit/pgsplit"
	"github.com/pgsplit/pgsplit/debugpage"
)

// findChromium returns the Chromium to test with, or "" where there is none and PGSPLIT_TEST_CHROMIUM does not ask for one.
func findChromium(t *testing.T) string {
	t.Helper()
	for _, name := range []string{"chromium", "chromium-browser", "google-chrome"} {
		if path, err := exec.LookPath(name); err == nil {
			return path
		}
	}
	if os.Getenv("PGSPLIT_TEST_CHROMIUM") == "require" {
		t.Fatal("PGSPLIT_TEST_CHROMIUM=require, and there is no chromium in $PATH: `apt-get install chromium`")
	}
	t.Log("DID NOT RUN: no chromium in $PATH (PGSPLIT_TEST_CHROMIUM=require makes this a failure)")
	return ""
}

// chromium runs the browser once and returns what it prints.
func chromium(t *testing.T, binary, size string, args ...string) string {
	t.Helper()
	home, err := os.MkdirTemp("", "chromium-")
	must(t, err)
	defer os.RemoveAll(home)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, binary, append([]string{"--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
		"--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync",
		"--no-proxy-server", "--hide-scrollbars", "--user-data-dir=" + filepath.Join(home, "profile"), "--window-size=" + size}, args...)...)
	cmd.Env = append(os.Environ(), "HOME="+home, "XDG_CONFIG_HOME="+home, "XDG_CACHE_HOME="+home)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	// A browser is many processes, which end together.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = 10 * time.Second
	err = cmd.Run()
	_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
	if err != nil {
		t.Fatalf("%v: %s", err, stderr.String())
	}
	return stdout.String()
}

// framable is the page as it is, except that a page of the same server may have it in a frame.
func framable(page http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		inner := httptest.NewRecorder()
		page.ServeHTTP(inner, r)
		w.Header().Set("Content-Security-Policy",
			strings.Replace(inner.Header().Get("Content-Security-Policy"), "frame-ancestors 'none'", "frame-ancestors 'self'", 1))
		w.Header().Set("Content-Type", inner.Header().Get("Content-Type"))
		fmt.Fprint(w, inner.Body)
	})
}

// frames are the widths at which a frame has the page, side by side from the left.
var frames = []int{360, 1280}

const frameHeight = 900

// framed has the page in frames, since no window of a browser is as narrow as a phone. The frames' sandbox runs no
// scripts. The title tells how the page came out in each.
func framed(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "text/html")
	fmt.Fprint(w, `<!DOCTYPE html><title></title><meta name="color-scheme" content="light dark">
<body style="margin: 0; display: flex; overflow: hidden">`)
	for _, width := range frames {
		fmt.Fprintf(w, `<iframe sandbox="allow-same-origin" src="/framable/" style="border: 0; flex: none; width: %dpx; height: %dpx"></iframe>`,
			width, frameHeight)
	}
	fmt.Fprint(w, `
<script>
onload = () => {
  document.title = JSON.stringify([...document.querySelectorAll("iframe")].map(frame => {
    const page = frame.contentDocument, root = page.documentElement;
    return {
      width: root.clientWidth,
      scroll: root.scrollWidth,
      wide: [...page.querySelectorAll("body, body :not(svg *)")].filter(e => e.getBoundingClientRect().right > root.clientWidth).length,
      card: getComputedStyle(page.querySelector(".card")).borderTopLeftRadius,
      text: page.body.innerText,
    };
  }));
};
</script>`)
}

var titleElement = regexp.MustCompile(`(?s)<title>(.*?)</title>`)

func title(t *testing.T, dom string) string {
	t.Helper()
	found := titleElement.FindStringSubmatch(dom)
	if found == nil {
		t.Fatalf("no title in %s", dom)
	}
	return html.UnescapeString(found[1])
}

func TestTheDebugPageInABrowser(t *testing.T) {
	browser := findChromium(t)
	if browser == "" {
		return
	}
	c := startCluster(t, 2)
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	config, err := pgsplit.ParseDSN(c.DSN())
	must(t, err)
	config.ReplicaTimeout = 20 * time.Second
	config.Replicas[0].Name = `</title><script nonce="test">document.title = "taken over"</script>`
	config.Replicas[0].Label = strings.Repeat("a_long_label_without_a_blank", 8)
	config.Replicas[1].Name = "analytics"
	db, err := pgsplit.OpenDB(config)
	must(t, err)
	defer db.Close()
	page := debugpage.Handler(db)
	mux := http.NewServeMux()
	mux.Handle("/debug/pgsplit/", page)
	mux.Handle("/framable/", framable(page))
	mux.HandleFunc("/framed/", framed)
	server := httptest.NewServer(mux)
	defer server.Close()
	url := server.URL + "/debug/pgsplit/"

	_, err = db.ExecContext(ctx, "create table note (body text)")
	must(t, err)
	must(t, c.CatchUp(ctx, 0))
	for range 20 {
		var n int
		must(t, db.QueryRowContext(pgsplit.ReadOnly(ctx), "select count(*) from note").Scan(&n))
	}
	must(t, c.PauseReplay(ctx, 0))
	_, err = db.ExecContext(ctx, "insert into note select generate_series(1, 1000)")
	must(t, err)
	must(t, c.StopReplica(ctx, 1))
	connector, err := pgsplit.FromDB(db)
	must(t, err)
	for h := connector.Health(ctx); h.Servers[1].LagBytes <= 0 || h.Servers[2].State != "down"; h = connector.Health(ctx) {
		must(t, ctx.Err())
	}

	t.Run("AsItIs", func(t *testing.T) {
		dom := chromium(t, browser, "1280,900", "--dump-dom", url)
		for _, want := range []string{"kB behind", ">down</span>", "connection refused", "analytics", "<svg", "unhinted", "&lt;script"} {
			if !strings.Contains(dom, want) {
				t.Errorf("no %q in %s", want, dom)
			}
		}
		if got := title(t, dom); got != "pgsplit: degraded" {
			t.Errorf("title %q", got)
		}
	})
	// `go test -artifacts` keeps the pictures.
	for scheme, setting := range map[string]string{"light": "1", "dark": "0"} {
		t.Run("WithoutScripts"+scheme, func(t *testing.T) {
			file := filepath.Join(t.ArtifactDir(), "page.png")
			window := fmt.Sprintf("%d,%d", frames[0]+frames[1], frameHeight)
			dom := chromium(t, browser, window, "--blink-settings=preferredColorScheme="+setting, "--screenshot="+file, "--dump-dom",
				server.URL+"/framed/")
			var measured []struct {
				Width, Scroll, Wide int
				Card, Text          string
			}
			if err := json.Unmarshal([]byte(title(t, dom)), &measured); err != nil || len(measured) != len(frames) {
				t.Fatalf("%v: title %s", err, title(t, dom))
			}
			pictures := look(t, file)
			for i, m := range measured {
				if m.Width != frames[i] || m.Scroll > m.Width || m.Wide > 0 {
					t.Errorf("the page scrolls sideways: %+v", m)
				}
				if m.Card == "" || m.Card == "0px" {
					t.Errorf("its policy keeps the page's style sheet out: %+v", m)
				}
				for _, want := range []string{"kB behind", "connection refused", "analytics"} {
					if !strings.Contains(m.Text, want) {
						t.Errorf("no %q in %s", want, m.Text)
					}
				}
				seen := pictures[i]
				if dark := luminance(seen.corner) < 0x4000; len(seen.all) < 50 || dark != (scheme == "dark") {
					t.Errorf("%d wide: %d colours, %v in the corner", m.Width, len(seen.all), seen.corner)
				}
			}
		})
	}
}

// picture is which colours a part of a screenshot has.
type picture struct {
	all    map[color.Color]bool
	corner color.Color
}

// look reads the screenshot of framed, frame by frame.
func look(t *testing.T, file string) (pictures []picture) {
	t.Helper()
	data, err := os.ReadFile(file)
	must(t, err)
	image, err := png.Decode(bytes.NewReader(data))
	must(t, err)
	if size := image.Bounds().Size(); size.X != frames[0]+frames[1] || size.Y != frameHeight {
		t.Fatalf("the screenshot is %v", size)
	}
	left := 0
	for _, width := range frames {
		seen := picture{all: map[color.Color]bool{}, corner: image.At(left, 0)}
		for y := range frameHeight {
			for x := left; x < left+width; x++ {
				seen.all[image.At(x, y)] = true
			}
		}
		pictures = append(pictures, seen)
		left += width
	}
	return pictures
}

func luminance(c color.Color) uint32 {
	r, g, b, _ := c.RGBA()
	return (r + g + b) / 3
}
