import org.apache.flink.configuration.Configuration;
import org.apache.flink.table.api.EnvironmentSettings;
import org.apache.flink.table.api.TableEnvironment;

/** The job of docs/howto/dedup.md in Flink SQL, in one process, until the topic is at its end. */
public class FlinkDedup {
    public static void main(String[] arguments) throws Exception {
        String servers = arguments[0], topic = arguments[1], folder = arguments[2];
        Configuration settings = new Configuration();
        settings.setString("table.exec.state.ttl", "24 h");
        settings.setString("execution.checkpointing.interval", "10 s");
        settings.setString("execution.checkpointing.dir", "file://" + folder);
        settings.setString("state.backend.type", "rocksdb");
        settings.setString("parallelism.default", String.valueOf(Runtime.getRuntime().availableProcessors()));
        TableEnvironment tables = TableEnvironment.create(
            EnvironmentSettings.newInstance().inStreamingMode().withConfiguration(settings).build());
        String columns = "id STRING, type STRING, customer STRING, cents INT, note STRING";
        String kafka = "'connector' = 'kafka', 'properties.bootstrap.servers' = '" + servers + "', 'format' = 'json', ";
        tables.executeSql("CREATE TABLE events (" + columns + ", arrived AS PROCTIME()) WITH (" + kafka
            + "'topic' = '" + topic + "', 'properties.group.id' = 'flink', 'scan.startup.mode' = 'earliest-offset',"
            + "'scan.bounded.mode' = 'latest-offset', 'properties.isolation.level' = 'read_committed')");
        tables.executeSql("CREATE TABLE firsts (" + columns + ") WITH (" + kafka
            + "'topic' = '" + topic + ".flink', 'sink.transactional-id-prefix' = '" + topic + "',"
            + "'properties.transaction.timeout.ms' = '600000', 'sink.delivery-guarantee' = 'exactly" + "-once')");
        tables.executeSql("INSERT INTO firsts SELECT id, type, customer, cents, note FROM ("
            + "SELECT *, ROW_NUMBER() OVER (PARTITION BY id ORDER BY arrived ASC) AS n FROM events) WHERE n = 1").await();
    }
}
