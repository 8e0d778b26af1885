package integration

import (
	"context"
	"database/sql"
	"errors"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/jmoiron/sqlx"
	"gorm.io/driver/postgres"
	"gorm.io/gorm"
	"gorm.io/gorm/clause"
	"gorm.io/gorm/logger"

	"github.com/pgsplit/pgsplit"
)

// gormCases are the ways of GORM and sqlx over database/sql.
var gormCases = []conformanceCase{
	{"GORMWorks", func(r *run) { gormWorks(r, gorm.Config{}) }},
	{"GORMWorksWithPreparedStatements", func(r *run) { gormWorks(r, gorm.Config{PrepareStmt: true}) }},
	{"GORMMigratesATable", gormMigrates},
	{"GORMKeepsTimeZones", gormTimeZones},
	{"SqlxWorks", sqlxWorks},
}

type shop struct {
	ID        uint `gorm:"primaryKey"`
	CreatedAt time.Time
	Name      string  `gorm:"size:40;uniqueIndex"`
	Rating    *int    `gorm:"check:rating_check,rating < 6"`
	Balance   float64 `gorm:"type:numeric(10,2);not null;default:0"`
	Tags      []byte  `gorm:"type:jsonb"`
	Items     []item
	Deleted   gorm.DeletedAt
}

type item struct {
	ID     uint
	ShopID uint `gorm:"index"`
	Title  string
}

func openGORM(db *sql.DB, config gorm.Config) (*gorm.DB, error) {
	config.Logger = logger.Discard
	config.NowFunc = func() time.Time { return time.Date(2024, 2, 29, 12, 0, 0, 0, time.UTC) }
	return gorm.Open(postgres.New(postgres.Config{Conn: db}), &config)
}

// noteShops notes what of the shops does not depend on the clock or the zone.
func noteShops(r *run, what string, shops []shop, result *gorm.DB) {
	r.note(what, len(shops), result.RowsAffected, result.Error)
	for _, s := range shops {
		r.note("shop", s.ID, s.CreatedAt.UTC(), s.Name, s.Rating, s.Balance, s.Tags, s.Items, s.Deleted.Valid)
	}
}

func gormWorks(r *run, config gorm.Config) {
	r.exec(r.db, "drop table if exists items, shops")
	db, err := openGORM(r.db, config)
	r.must(err)
	db = db.WithContext(r.ctx)
	r.note("migrate", db.AutoMigrate(&shop{}, &item{}))
	r.note("migrate again", db.AutoMigrate(&shop{}, &item{}))

	rating := 5
	first := shop{Name: "first", Rating: &rating, Balance: 12.34, Tags: []byte(`{"a": [1]}`)}
	first.Items = []item{{Title: "x"}, {Title: "y"}}
	created := db.Create(&first)
	r.note("create", created.Error, created.RowsAffected, first.ID, first.Items)
	many := []shop{{Name: "second"}, {Name: "third"}}
	created = db.Create(&many)
	r.note("create two", created.Error, created.RowsAffected, many[0].ID, many[1].ID)
	r.note("the same name", db.Create(&shop{Name: "first"}).Error)
	rating = 6
	r.note("too good", db.Create(&shop{Name: "fourth", Rating: &rating}).Error)
	created = db.Clauses(clause.OnConflict{Columns: []clause.Column{{Name: "name"}}, DoUpdates: clause.AssignmentColumns([]string{"balance"})}).
		Create(&shop{Name: "third", Balance: 3})
	r.note("upsert", created.Error, created.RowsAffected)

	for range 3 {
		var shops []shop
		found := db.Preload("Items").Where("name <> ?", "nobody").Order("id").Find(&shops)
		noteShops(r, "find", shops, found)
		var one shop
		r.note("first", db.First(&one, "name = ?", "second").Error, &one.Name)
		r.note("nobody", db.First(&shop{}, "name = ?", "nobody").Error)
		var n int64
		r.note("count", db.Model(&shop{}).Where("id in ?", []uint{1, 2, 77}).Count(&n).Error, &n)
		var names []string
		r.note("pluck", db.Model(&shop{}).Order("name").Pluck("name", &names).Error, &names)
	}
	updated := db.Model(&shop{}).Where("balance < ?", 5).Update("balance", gorm.Expr("balance + ?", 1.5))
	r.note("update", updated.Error, updated.RowsAffected)
	r.note("delete", db.Delete(&many[0]).Error)
	var shops []shop
	found := db.Unscoped().Order("id").Find(&shops)
	noteShops(r, "deleted too", shops, found)

	rollback := errors.New("not this time")
	r.note("rolled back", db.Transaction(func(tx *gorm.DB) error {
		if err := tx.Create(&shop{Name: "never"}).Error; err != nil {
			return err
		}
		return rollback
	}))
	r.note("nested", db.Transaction(func(tx *gorm.DB) error {
		if err := tx.Create(&shop{Name: "outer"}).Error; err != nil {
			return err
		}
		r.note("inner", tx.Transaction(func(tx *gorm.DB) error {
			if err := tx.Create(&shop{Name: "inner"}).Error; err != nil {
				return err
			}
			return rollback
		}))
		return tx.Model(&shop{}).Where("name = ?", "outer").Update("balance", 9).Error
	}, &sql.TxOptions{Isolation: sql.LevelRepeatableRead}))
	var names []string
	r.note("names", db.Model(&shop{}).Order("name").Pluck("name", &names).Error, &names)
	r.note("locked", db.Transaction(func(tx *gorm.DB) error {
		return tx.Clauses(clause.Locking{Strength: "UPDATE"}).Find(&shops).Error
	}))
	r.note("locked shops", len(shops))
	rows, err := db.Raw("select name, balance from shops where deleted is null order by id").Rows()
	r.must(err)
	for rows.Next() {
		var scanned struct {
			Name    string
			Balance float64
		}
		r.note("row", db.ScanRows(rows, &scanned), &scanned)
	}
	r.note("rows", rows.Close())
	r.note("a mistake", db.Exec("selec 1").Error)
	r.note("in use", r.db.Stats().InUse)
	r.exec(r.db, "drop table items, shops")
}

// settled does again what met a plan from before a table changed (0A000). Whether a connection has one depends on what it was
// used for before, by either driver.
func settled(f func() error) (err error) {
	for range 20 {
		if err = f(); err == nil || !strings.Contains(err.Error(), "0A000") {
			return err
		}
	}
	return err
}

func gormMigrates(r *run) {
	r.exec(r.db, "drop table if exists items, shops; create table shops (id bigserial primary key, name varchar(10))")
	// Without plans that a change of the table would break on whichever connection has one, with either driver (0A000).
	unplanned := func(u *url.URL) { setParameter(u, "default_query_exec_mode", "simple_protocol") }
	for range 2 {
		db, err := openGORM(r.open(unplanned), gorm.Config{})
		r.must(err)
		db = db.WithContext(r.ctx)
		var before []map[string]any
		r.note("before", db.Table("shops").Find(&before).Error, &before)
		r.note("migrate", settled(func() error { return db.AutoMigrate(&shop{}) }))
		var after []map[string]any
		r.note("after", settled(func() error {
			after = nil
			return db.Table("shops").Find(&after).Error
		}), &after)
		now, err := openGORM(r.open(unplanned), gorm.Config{})
		r.must(err)
		types, err := now.WithContext(r.ctx).Migrator().ColumnTypes(&shop{})
		r.must(err)
		for _, c := range types {
			length, hasLength := c.Length()
			nullable, knows := c.Nullable()
			precision, scale, isDecimal := c.DecimalSize()
			value, hasDefault := c.DefaultValue()
			r.note("column", c.Name(), c.DatabaseTypeName(), length, hasLength, nullable, knows, precision, scale, isDecimal, value, hasDefault)
		}
		r.note("index", db.Migrator().HasIndex(&shop{}, "Name"), db.Migrator().HasTable("shops"), db.Migrator().CurrentDatabase() == r.database)
		r.note("drop a column", db.Migrator().DropColumn(&shop{}, "tags"), db.Migrator().HasColumn(&shop{}, "tags"))
	}
	r.exec(r.db, "drop table shops")
}

func gormTimeZones(r *run) {
	type event struct {
		ID    int
		At    time.Time `gorm:"type:timestamptz"`
		Local time.Time `gorm:"type:timestamp"`
		Day   time.Time `gorm:"type:date"`
	}
	for _, zone := range []string{"UTC", "Asia/Tokyo", "America/New_York"} {
		db, err := openGORM(r.open(func(u *url.URL) { setParameter(u, "timezone", zone) }), gorm.Config{})
		r.must(err)
		db = db.WithContext(r.ctx)
		r.note(zone, db.Migrator().DropTable(&event{}), db.AutoMigrate(&event{}))
		at := time.Date(2024, 7, 1, 23, 30, 0, 123456000, time.FixedZone("", -7*3600))
		r.note("create", db.Create(&event{ID: 1, At: at, Local: at, Day: at}).Error)
		var got event
		r.note("find", db.First(&got, "at = ?", at).Error)
		r.note("found", got.At.Equal(at), got.At.UTC(), got.Local, got.Day)
		var text string
		r.note("text", db.Raw("select at::text || ' ' || local || ' ' || day from events").Scan(&text).Error, &text)
	}
}

func sqlxWorks(r *run) {
	db := sqlx.NewDb(r.db, "pgx")
	type row struct {
		ID     int             `db:"id"`
		Parent sql.NullInt64   `db:"parent"`
		Label  string          `db:"label"`
		Price  sql.NullFloat64 `db:"price"`
	}
	const insert = "insert into child (id, parent, label, price) values (:id, :parent, :label, :price)"
	_, err := db.NamedExecContext(r.ctx, insert, row{ID: 500, Label: "by name"})
	r.note("named exec", err)
	result, err := db.NamedExecContext(r.ctx, insert, []row{{ID: 501, Label: "a"}, {ID: 502, Label: "b"}})
	r.must(err)
	noteResult(r, "named exec of two", result, err)
	var one row
	r.note("get", db.GetContext(r.ctx, &one, "select * from child where id = $1", 500), &one)
	r.note("get nobody", db.GetContext(r.ctx, &one, "select * from child where id = $1", 599))
	r.note("rebind", db.GetContext(r.ctx, &one, db.Rebind("select * from child where id = ? and label = ?"), 501, "a"), &one)
	var all []row
	r.note("select", db.SelectContext(r.ctx, &all, "select * from child where id >= $1 order by id", 500), &all)
	query, args, err := sqlx.In("select * from child where id in (?) order by id", []int{500, 502})
	r.must(err)
	r.note("in", db.SelectContext(r.ctx, &all, db.Rebind(query), args...), &all)
	stmt, err := db.PrepareNamedContext(r.ctx, "select label from child where id = :id")
	r.must(err)
	var label string
	r.note("named statement", stmt.GetContext(r.ctx, &label, map[string]any{"id": 502}), &label, stmt.Close())
	tx, err := db.BeginTxx(r.ctx, nil)
	r.must(err)
	_, err = tx.NamedExecContext(r.ctx, "delete from child where id >= :id", map[string]any{"id": 500})
	r.note("in a transaction", err, tx.Commit())
	r.note("left", db.GetContext(r.ctx, &label, "select count(*)::text from child"), &label)
}

func TestGORMReadsFromAReplicaUnderReadOnly(t *testing.T) {
	overEachWrapper(t, func(t *testing.T, c cluster, open func() *sql.DB) {
		for _, prepare := range []bool{false, true} {
			ctx := limited(t)
			pool := open()
			mustExec(t, ctx, c.PrimaryURI(), "drop table if exists items, shops")
			db, err := openGORM(pool, gorm.Config{PrepareStmt: prepare})
			must(t, err)
			must(t, db.WithContext(ctx).AutoMigrate(&shop{}, &item{}))
			must(t, db.WithContext(ctx).Create(&shop{Name: "first", Items: []item{{Title: "x"}}}).Error)
			lsn, err := pgsplit.CommitLSN(ctx, pool)
			must(t, err)
			connector, err := pgsplit.FromDB(pool)
			must(t, err)
			onReplicas := func() (n uint64) {
				for _, s := range connector.Stats().Servers[1:] {
					n += s.Statements
				}
				return n
			}
			read := pgsplit.ReadOnly(pgsplit.WithLSN(ctx, lsn), pgsplit.MaxWait(30*time.Second))
			for range 3 {
				before := onReplicas()
				var shops []shop
				must(t, db.WithContext(read).Preload("Items").Find(&shops).Error)
				if len(shops) != 1 || len(shops[0].Items) != 1 {
					t.Errorf("found %+v", shops)
				}
				if after := onReplicas(); after <= before {
					t.Errorf("%d statements on replicas after Find, %d before", after, before)
				}
			}
			gormIn(t, read, db, true)
			gormIn(t, ctx, db, false)
			must(t, db.WithContext(read).Transaction(func(tx *gorm.DB) error {
				gormIn(t, read, tx, true)
				gormIn(t, ctx, tx, true)
				return nil
			}))
			must(t, db.WithContext(ctx).Transaction(func(tx *gorm.DB) error {
				gormIn(t, read, tx, false)
				return tx.Create(&shop{Name: "second"}).Error
			}))
			err = db.WithContext(read).Create(&shop{Name: "third"}).Error
			if !errors.Is(err, pgsplit.ErrReadOnly) {
				t.Errorf("a write under ReadOnly: %v", err)
			}
			must(t, pool.Close())
		}
	})
}

func gormIn(t *testing.T, ctx context.Context, db *gorm.DB, want bool) {
	t.Helper()
	var got bool
	must(t, db.WithContext(ctx).Raw("select pg_is_in_recovery()").Scan(&got).Error)
	if got != want {
		t.Errorf("in recovery %v, want %v", got, want)
	}
}

func TestSqlxReadsFromAReplicaUnderReadOnly(t *testing.T) {
	overEachWrapper(t, func(t *testing.T, c cluster, open func() *sql.DB) {
		ctx := limited(t)
		db := sqlx.NewDb(open(), "pgx")
		for ctx, want := range map[context.Context]bool{ctx: false, pgsplit.ReadOnly(ctx): true} {
			var got bool
			must(t, db.GetContext(ctx, &got, "select pg_is_in_recovery() and $1 = 'x'", "x"))
			if got != want {
				t.Errorf("in recovery %v, want %v", got, want)
			}
			var all []bool
			must(t, db.SelectContext(ctx, &all, db.Rebind("select pg_is_in_recovery() and ? = 'x'"), "x"))
			if len(all) != 1 || all[0] != want {
				t.Errorf("in recovery %v, want %v", all, want)
			}
		}
	})
}
